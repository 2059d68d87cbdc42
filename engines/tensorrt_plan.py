"""A plan in memory: its engine, checked against the contract, its two profiles, and contexts made from it.

Invariants
- A plan is used only after its inputs, outputs, aliases and profiles were found to be what steps will bind.
- An error that is kept, and with it its traceback, keeps no engine alive.

Threads: one owner, inside `Device.current()`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engines.contract import EngineSpec
from engines.cuda import DeviceMemory, Stream
from engines.errors import DeviceError, ReleaseError
from engines.io_contract import Tensors, compare_tensors
from engines.trt import deserialise, load_tensorrt, messages
from engines.windows import windows

_ANY = -1  # what a plan says where a size is decided by the step
_Tensor = tuple[str, tuple[int | str, ...]]


@dataclass(frozen=True, slots=True)
class Profile:
    """One optimization profile: shapes it takes. `tokens` is least, best, most; `window` least, most."""

    index: int
    rows: int
    tokens: tuple[int, int, int]
    window: tuple[int, int]


class Plan:
    """Owns TensorRT's runtime and engine; `prefill` and `decode` are its profiles for these steps."""

    def __init__(self, plan: memoryview, spec: EngineSpec, *, kv_dtype: str) -> None:
        """Deserialise and check; ReleaseError (steps "deserialise", "contract")."""
        self._tensorrt = load_tensorrt()
        self._runtime, self._engine = deserialise(plan)
        try:
            inputs, outputs = self._tensors()
            check_tensors(spec, kv_dtype, inputs, outputs)
            check_aliases(spec, {name: self._engine.get_aliased_input_tensor(name) for name in outputs})
            self.prefill, self.decode = choose_profiles(self._profiles(), spec)
        except BaseException:
            self.close()  # else whoever keeps the error keeps the weights
            raise

    @property
    def activation_bytes(self) -> int:
        """Device memory for the activations of either profile's steps."""
        engine = self._engine
        profiles = (self.prefill.index, self.decode.index)
        return max(int(engine.get_device_memory_size_for_profile_v2(index)) for index in profiles)

    def context(self, profile: Profile, stream: Stream, activations: DeviceMemory) -> Any:
        """An execution context for steps of `profile` in `stream`, which use `activations`. DeviceError."""
        point = messages.count
        strategy = self._tensorrt.ExecutionContextAllocationStrategy.USER_MANAGED
        context = self._engine.create_execution_context(strategy)
        if context is None:
            raise DeviceError(f"TensorRT: create_execution_context failed: {messages.after(point)}")
        context.set_device_memory(activations.address, activations.nbytes)
        try:
            context.set_optimization_profile_async(profile.index, stream.handle)
        except RuntimeError:  # the one call of a context whose bindings raise instead of answering False
            context = None  # else whoever keeps the error keeps it, and the engine
            reason = f"TensorRT: profile {profile.index} was refused: {messages.after(point)}"
            raise DeviceError(reason) from None
        return context

    def close(self) -> None:
        """Free engine and runtime, after every context. Idempotent."""
        self._engine = None
        self._runtime = None

    def _tensors(self) -> tuple[dict[str, _Tensor], dict[str, _Tensor]]:
        """(inputs, outputs) by name."""
        trt, engine = self._tensorrt, self._engine
        kinds = _dtype_names(trt.DataType)
        inputs: dict[str, _Tensor] = {}
        outputs: dict[str, _Tensor] = {}
        for index in range(engine.num_io_tensors):
            name = engine.get_tensor_name(index)
            kind = kinds.get(engine.get_tensor_dtype(name), "another type")
            if engine.get_tensor_location(name) != trt.TensorLocation.DEVICE:
                kind += " on the host"
            is_input = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
            (inputs if is_input else outputs)[name] = (kind, tuple(map(int, engine.get_tensor_shape(name))))
        return inputs, outputs

    def _profiles(self) -> list[Profile]:
        return [self._profile(index) for index in range(self._engine.num_optimization_profiles)]

    def _profile(self, index: int) -> Profile:
        shapes = self._engine.get_tensor_profile_shape
        least, best, most = (tuple(map(int, shape)) for shape in shapes("input_ids", index))
        window = [int(shape[0]) for shape in shapes("kv_positions", index)]
        tokens = (least[1], best[1], most[1])
        return Profile(index=index, rows=most[0], tokens=tokens, window=(window[0], window[-1]))


def expected_tensors(spec: EngineSpec, kv_dtype: str) -> tuple[dict[str, _Tensor], dict[str, _Tensor]]:
    """(inputs, outputs) of the contract; sizes that a step decides are names."""
    g = spec.geometry
    cache: _Tensor = (kv_dtype, ("B", g.kv_heads, spec.positions, g.head_dim))
    inputs: dict[str, _Tensor] = {
        "input_ids": ("int64", ("B", "T")),
        "position_ids": ("int64", ("B", "T")),
        "write_indices": ("int64", ("B",)),
        "kv_positions": ("int64", ("W",)),
        "logit_indices": ("int64", ("B", "R")),
    }
    outputs: dict[str, _Tensor] = {"logits": ("float32", ("B", "R", g.vocab_size))}
    for past, present in cache_names(spec):
        inputs[past] = cache
        outputs[present] = cache
    return inputs, outputs


def check_tensors(spec: EngineSpec, kv_dtype: str, inputs: Tensors, outputs: Tensors) -> None:
    """Inputs and outputs as a plan tells them must be the contract's. ReleaseError (step "contract")."""
    expected_in, expected_out = expected_tensors(spec, kv_dtype)
    compare_tensors("input", expected_in, _named_sizes(inputs, expected_in))
    compare_tensors("output", expected_out, _named_sizes(outputs, expected_out))


def cache_names(spec: EngineSpec) -> Iterator[tuple[str, str]]:
    """(past, present) of each layer's keys and values, in the order of the pool."""
    for layer in range(spec.geometry.layers):
        for kind in ("key", "value"):
            yield f"past_{kind}_{layer}", f"present_{kind}_{layer}"


def check_aliases(spec: EngineSpec, aliases: Mapping[str, str | None]) -> None:
    """Every present must be written where its past is: else a step would leave the lanes as they were."""
    for past, present in cache_names(spec):
        if aliases.get(present) != past:
            found = aliases.get(present) or "memory of its own"
            raise ReleaseError("contract", expected=f"output {present} in the memory of {past}", found=found)


def choose_profiles(profiles: Sequence[Profile], spec: EngineSpec) -> tuple[Profile, Profile]:
    """(prefill, decode): the first that takes the longest prefill, another one that takes all lanes."""
    room = [profile for profile in profiles if _takes_every_window(profile, spec)]
    prefill = [p for p in room if p.tokens[0] == 1 and p.tokens[2] >= spec.max_prefill_tokens]
    decode = [p for p in room if p.tokens[0] == 1 and p.rows >= spec.lanes and p not in prefill[:1]]
    if not prefill or not decode:
        raise ReleaseError(
            "contract",
            expected=f"a profile for prefills of 1 … {spec.max_prefill_tokens} tokens and another for "
            f"decodes of 1 … {spec.lanes} lanes, windows up to {spec.positions}",
            found="; ".join(map(_shown, profiles)) or "no profile",
        )
    return prefill[0], decode[0]


def _takes_every_window(profile: Profile, spec: EngineSpec) -> bool:
    sizes = windows(spec.positions)
    return profile.window[0] <= sizes[0] and profile.window[1] >= sizes[-1]


def _shown(profile: Profile) -> str:
    least, _, most = profile.tokens
    low, high = profile.window
    return f"up to {profile.rows} rows of {least} … {most} tokens, windows {low} … {high}"


def _dtype_names(types: Any) -> dict[Any, str]:
    return {
        types.INT64: "int64",
        types.FLOAT: "float32",
        types.HALF: "float16",
        types.BF16: "bfloat16",
    }


def _named_sizes(found: Mapping[str, _Tensor], expected: Tensors) -> dict[str, _Tensor]:
    """`found` with the contract's names for sizes that a step decides, where the plan leaves them open.

    R is 1 in every step of today, so a plan may have settled it.
    """
    named = {}
    for name, (kind, shape) in found.items():
        wanted = expected.get(name, ("", ()))[1]
        if len(wanted) == len(shape):
            shape = tuple(
                want if isinstance(want, str) and (size == _ANY or (want, size) == ("R", 1)) else size
                for want, size in zip(wanted, shape, strict=True)
            )
        named[name] = (kind, shape)
    return named
