"""Builds the plan of a decoder: one TensorRT engine with a profile for prefill and one for decode.

    prefill   one row of 1 … max_prefill_tokens tokens, tuned for the longest
    decode    1 … lanes rows of one token, tuned for all of them
    both      any window of the cache from the least to all S positions

`trt` is the TensorRT module (see tensorrt_network): everything here runs without a GPU under TensorRT-RTX,
except `inspect_plan`, which takes an opened engine.

Builds differ from one run to the next, because kernels are chosen by timing them; a timing cache makes a
second build quick, and more alike. What KV means does not change with it.
"""

import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.build_options import BuildOptions, PlanOptions
from engines.contract import Geometry
from engines.errors import BuildError
from engines.layer_report import LayerReport, report_layers
from engines.manifest import ProfileInfo
from engines.new_file import NewFile, replace_file
from engines.tensorrt_network import ParsedNetwork
from engines.windows import LEAST_WINDOW

logger = logging.getLogger(__name__)

_TYPICAL_PART = 4  # most sequences are far shorter than their lane: kernels are tuned for a quarter of it

Report = Callable[[float], None]
"""Told how much of the build is done, 0 … 1."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many rows, tokens a row and window positions one step has."""

    rows: int
    tokens: int
    window: int

    def shape_of(self, name: str, declared: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a graph input in such a step; caches have one row a lane and are static otherwise."""
        match name:
            case "kv_positions":
                return (self.window,)
            case "input_ids" | "position_ids":
                return (self.rows, self.tokens)
            case "write_indices":
                return (self.rows,)
            case "logit_indices":
                return (self.rows, 1)
            case _:
                return (self.rows, *declared[1:])


@dataclass(frozen=True, slots=True)
class Profile:
    """One optimization profile: the smallest, the tuned-for and the largest step."""

    least: Sizes
    typical: Sizes
    most: Sizes


def profiles_of(options: BuildOptions) -> tuple[Profile, Profile]:
    """Prefill, then decode."""
    positions = options.positions
    least = min(LEAST_WINDOW, positions)
    typical = max(least, 1 << (positions // _TYPICAL_PART).bit_length() - 1)

    def profile(rows: int, tokens: int) -> Profile:
        return Profile(Sizes(1, 1, least), Sizes(rows, tokens, typical), Sizes(rows, tokens, positions))

    return profile(1, options.max_prefill_tokens), profile(options.lanes, 1)


def build_plan(
    trt: Any,
    builder: Any,
    parsed: ParsedNetwork,
    *,
    options: BuildOptions,
    gpu_name: str,
    messages: Callable[[], str],
    report: Report = lambda done: None,
) -> memoryview:
    """Serialise the engine of an inspected network; `messages` tells what TensorRT said last. BuildError."""
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # or the inspector knows no layers
    if options.plan.workspace_bytes:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.plan.workspace_bytes)
    if options.plan.built_for == "capability":
        _widen(trt, config)
    for profile in profiles_of(options):
        _add_profile(builder, config, parsed.network, profile)
    monitor = _progress_monitor(trt, report)
    config.progress_monitor = monitor
    cache = TimingCache.of(options.plan, version=trt.__version__, gpu_name=gpu_name)
    cache.lend(config)
    plan = builder.build_serialized_network(parsed.network, config)
    if monitor.failure is not None:
        raise monitor.failure
    if plan is None:
        reason = " ".join(messages().split()) or "it gives no reason"
        raise BuildError(f"plan: TensorRT {trt.__version__} builds none: {reason}")
    cache.keep(config)
    return memoryview(plan).cast("B")


def inspect_plan(
    trt: Any, engine: Any, *, options: BuildOptions, geometry: Geometry, weight_errors: dict[str, float]
) -> tuple[LayerReport, tuple[ProfileInfo, ...]]:
    """What an opened engine runs, and the shapes and activation memory of its profiles."""
    profiles = profiles_of(options)
    if engine.num_optimization_profiles != len(profiles):
        found = engine.num_optimization_profiles
        raise BuildError(f"plan: {found} optimization profiles, expected {len(profiles)}")
    nbytes = tuple(engine.get_device_memory_size_for_profile_v2(index) for index in range(len(profiles)))
    infos = tuple(
        ProfileInfo(
            rows=profile.most.rows,
            tokens=profile.most.tokens,
            least_window=profile.least.window,
            window=profile.most.window,
            activation_bytes=activations,
        )
        for profile, activations in zip(profiles, nbytes, strict=True)
    )
    inspected = engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON)
    report = report_layers(
        inspected, attentions=geometry.layers, activation_bytes=nbytes, weight_errors=weight_errors
    )
    return report, infos


@dataclass(frozen=True, slots=True)
class TimingCache:
    """Kernel times measured by earlier builds, one file for a library version and a model of GPU; or none."""

    path: Path | None

    @classmethod
    def of(cls, plan: PlanOptions, *, version: str, gpu_name: str) -> "TimingCache":
        """The one in the folder of `plan`."""
        if plan.timing_cache is None:
            return cls(None)
        gpu = re.sub(r"[^a-z0-9]+", "-", gpu_name.lower()).strip("-")
        return cls(plan.timing_cache / f"tensorrt-{version}-{gpu}.timing")

    def lend(self, config: Any) -> None:
        """Let a build use and extend it; one that TensorRT does not take is begun anew."""
        if self.path is None:
            return
        known = self.path.read_bytes() if self.path.is_file() else b""
        if not _attach(config, known):
            logger.warning("%s: no timing cache of this library and GPU: begun anew", self.path)
            _attach(config, b"")

    def keep(self, config: Any) -> None:
        """Write what the build knows now."""
        cache = None if self.path is None else config.get_timing_cache()
        if self.path is None or cache is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(NewFile(self.path, bytes(memoryview(cache.serialize()).cast("B")), mode=0o644))


def _attach(config: Any, known: bytes) -> bool:
    cache = config.create_timing_cache(known)
    return cache is not None and bool(config.set_timing_cache(cache, False))  # False: refuse a mismatch


def _widen(trt: Any, config: Any) -> None:
    """Kernels for every GPU of the compute capability; a library without that ignores the wish in silence."""
    wished = trt.HardwareCompatibilityLevel.SAME_COMPUTE_CAPABILITY
    config.hardware_compatibility_level = wished
    if config.hardware_compatibility_level != wished:
        raise BuildError(
            f"built_for: TensorRT {trt.__version__} builds for this very GPU only, not for its capability"
        )


def _add_profile(builder: Any, config: Any, network: Any, profile: Profile) -> None:
    made = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        declared = tuple(tensor.shape)
        steps = (profile.least, profile.typical, profile.most)
        shapes = [sizes.shape_of(tensor.name, declared) for sizes in steps]
        try:
            made.set_shape(tensor.name, *shapes)
        except RuntimeError as error:  # how TensorRT's bindings refuse it
            raise BuildError(f"plan: TensorRT takes no shapes {shapes} for {tensor.name}: {error}") from None
    if config.add_optimization_profile(made) < 0:
        raise BuildError(f"plan: TensorRT takes no profile of {profile}")


def _progress_monitor(trt: Any, report: Report) -> Any:
    """An object that TensorRT tells, from any of its threads, how far its outermost phase is.

    Nothing may fly through TensorRT, which would end the process: what `report` raises, and Ctrl-C, which
    arrives wherever Python runs, is kept in `failure` and ends the build.
    """

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]  # the base is known at run time only
        def __init__(self) -> None:
            super().__init__()
            self._lock = threading.Lock()  # phases begin and end on several threads
            self._outermost: dict[str, int] = {}
            self.failure: BaseException | None = None

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            with self._kept():
                if parent_phase is None:
                    self._outermost[phase_name] = num_steps

        def step_complete(self, phase_name: str, step: int) -> bool:
            with self._kept():
                steps = self._outermost.get(phase_name, 0)
                if steps:
                    report(min(1.0, (step + 1) / steps))
            return self.failure is None  # False: no more steps

        def phase_finish(self, phase_name: str) -> None:
            with self._kept():
                self._outermost.pop(phase_name, None)

        @contextmanager
        def _kept(self) -> Iterator[None]:
            try:
                with self._lock:
                    yield
            except BaseException as error:
                self.failure = self.failure or error

    return Monitor()
