"""The builder half of the `tensorrt` target, run with TensorRT-RTX's builder, which needs no GPU.

Its plans are for TensorRT-RTX and cannot be opened here; what opens a plan runs on doubles (tests/rig) and on
a GPU (tests/gpu).
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import tensorrt_rtx

from engines.build_files import map_weights, write_weights
from engines.build_options import BuildOptions, PlanOptions, Precision, check_options
from engines.errors import BuildError, ReleaseError
from engines.graph_tensorrt import build_graph
from engines.layer_report import LayerReport, read_report, report_layers
from engines.onnx_emit import WEIGHTS_FILE, EmittedGraph
from engines.plan_builder import Sizes, TimingCache, build_plan, inspect_plan, profiles_of
from engines.plan_header import parse_plan_header
from engines.tensorrt_network import ParsedNetwork, inspect_network, parse_network
from engines.windows import row_counts, windows
from tests.engines.random_decoder import random_decoder

OPTIONS = BuildOptions(
    target="tensorrt", precision="float16", lanes=4, max_seq_len=600, block_tokens=16, max_prefill_tokens=64
)
DECODER = random_decoder(layers=1)
GEOMETRY = DECODER.config.geometry


class Ampere:
    """TensorRT-RTX's builder, told a compute capability instead of looking for the GPU that is not here."""

    def __init__(self, logger: Any) -> None:
        self._builder = tensorrt_rtx.Builder(logger)
        self.configs: list[Any] = []

    def create_builder_config(self) -> Any:
        config = self._builder.create_builder_config()
        config.num_compute_capabilities = 1
        config.set_compute_capability(tensorrt_rtx.ComputeCapability.SM80, 0)
        self.configs.append(config)
        return config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._builder, name)


class Silent(tensorrt_rtx.ILogger):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()

    def log(self, severity: Any, message: str) -> None:
        pass


def parse(
    folder: Path, precision: str = "float16", *, change: Callable[[EmittedGraph], EmittedGraph] = lambda g: g
) -> tuple[Ampere, ParsedNetwork]:
    """The network of a graph whose weights went through a file, as a build does it."""
    graph = build_graph(DECODER, positions=OPTIONS.positions, precision=precision)  # type: ignore[arg-type]
    write_weights(folder / WEIGHTS_FILE, graph, progress=lambda stage, done: None)
    weights = map_weights(folder / WEIGHTS_FILE, graph)
    (folder / WEIGHTS_FILE).unlink()
    builder, logger = Ampere(LOGGER), LOGGER
    parsed = parse_network(tensorrt_rtx, builder, logger, graph=change(graph), weights=weights)
    inspect_network(tensorrt_rtx, parsed.network, GEOMETRY)
    return builder, parsed


LOGGER = Silent()


def plan_of(
    builder: Ampere, parsed: ParsedNetwork, options: BuildOptions = OPTIONS, **more: Any
) -> memoryview:
    return build_plan(
        tensorrt_rtx, builder, parsed, options=options, gpu_name="NVIDIA A100", messages=lambda: "", **more
    )


@pytest.mark.parametrize("precision", ["float16", "bfloat16", "int4"])
def test_every_precision_builds_from_weights_in_a_file(tmp_path: Path, precision: Precision) -> None:
    builder, parsed = parse(tmp_path, precision)
    told: list[float] = []
    plan = plan_of(builder, parsed, report=told.append)
    assert bytes(plan[:4]) == b"vtrt"
    assert parse_size(plan) == len(plan)
    assert told, "nothing was said of the progress"
    assert 0 < min(told) <= max(told) <= 1
    with pytest.raises(ReleaseError, match="a plan for TensorRT-RTX"):
        parse_plan_header(plan)


def parse_size(plan: memoryview) -> int:
    return int.from_bytes(plan[16:24], "little")


def test_the_profiles_take_every_step_an_engine_makes() -> None:
    prefill, decode = profiles_of(OPTIONS)
    positions = OPTIONS.positions
    assert (prefill.least, prefill.most) == (Sizes(1, 1, 256), Sizes(1, 64, positions))
    assert (decode.least, decode.most) == (Sizes(1, 1, 256), Sizes(4, 1, positions))
    for profile in (prefill, decode):
        assert profile.typical.window in windows(positions)
        assert all(profile.least.window <= window <= profile.most.window for window in windows(positions))
        assert (profile.typical.rows, profile.typical.tokens) == (profile.most.rows, profile.most.tokens)
    assert all(1 <= rows <= decode.most.rows for rows in row_counts(OPTIONS.lanes))


@pytest.mark.parametrize(
    ("max_seq_len", "least", "typical", "most"),
    [(100, 112, 112, 112), (600, 256, 256, 608), (4096, 256, 1024, 4112), (131072, 256, 32768, 131088)],
)
def test_windows_of_short_and_long_lanes(max_seq_len: int, least: int, typical: int, most: int) -> None:
    options = msgspec.structs.replace(OPTIONS, max_seq_len=max_seq_len)
    for profile in profiles_of(options):
        found = (profile.least.window, profile.typical.window, profile.most.window)
        assert found == (least, typical, most)


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), ValueError("no terminal")])
def test_whatever_is_raised_meanwhile_ends_the_build_and_not_the_process(
    tmp_path: Path, failure: BaseException
) -> None:
    def fails(done: float) -> None:
        raise failure

    builder, parsed = parse(tmp_path)
    with pytest.raises(type(failure)) as raised:
        plan_of(builder, parsed, report=fails)
    assert raised.value is failure


def test_the_configuration_says_what_the_options_do(tmp_path: Path) -> None:
    builder, parsed = parse(tmp_path)
    plan_of(builder, parsed, with_plan(workspace_bytes=1 << 30))
    (config,) = builder.configs
    assert config.get_memory_pool_limit(tensorrt_rtx.MemoryPoolType.WORKSPACE) == 1 << 30
    assert config.profiling_verbosity == tensorrt_rtx.ProfilingVerbosity.DETAILED
    assert config.num_optimization_profiles == 2


def with_plan(**options: Any) -> BuildOptions:
    return msgspec.structs.replace(OPTIONS, plan=PlanOptions(**options))


def test_a_library_that_cannot_build_for_every_gpu_is_not_believed_to(tmp_path: Path) -> None:
    builder, parsed = parse(tmp_path)
    with pytest.raises(BuildError, match=r"built_for: TensorRT .* builds for this very GPU only"):
        plan_of(builder, parsed, with_plan(built_for="capability"))  # TensorRT-RTX is one


def test_a_plan_for_every_gpu_of_its_capability_is_asked_for(tmp_path: Path) -> None:
    _, parsed = parse(tmp_path)
    config = SimpleNamespace(add_optimization_profile=lambda profile: 0)
    builder = SimpleNamespace(
        create_builder_config=lambda: config,
        create_optimization_profile=Ampere(LOGGER).create_optimization_profile,
        build_serialized_network=lambda network, config: b"plan",
    )
    options = with_plan(built_for="capability")
    build_plan(tensorrt_rtx, builder, parsed, options=options, gpu_name="any", messages=lambda: "")
    level = tensorrt_rtx.HardwareCompatibilityLevel.SAME_COMPUTE_CAPABILITY
    assert config.hardware_compatibility_level == level


def test_a_plan_that_cannot_be_built_says_why(tmp_path: Path) -> None:
    builder, parsed = parse(tmp_path)
    nothing = SimpleNamespace(
        create_builder_config=builder.create_builder_config,
        create_optimization_profile=builder.create_optimization_profile,
        build_serialized_network=lambda network, config: None,
    )
    with pytest.raises(BuildError, match=r"builds none: error: out of tactics$"):
        build_plan(
            tensorrt_rtx,
            nothing,
            parsed,
            options=OPTIONS,
            gpu_name="any",
            messages=lambda: "error: out\n of tactics",
        )


def test_a_graph_that_does_not_parse_says_why(tmp_path: Path) -> None:
    def unknown_operator(graph: EmittedGraph) -> EmittedGraph:
        graph.model.graph.node[0].op_type = "NoSuchOperator"
        return graph

    with pytest.raises(BuildError, match=r"^network: TensorRT .* does not parse it: .*NoSuchOperator"):
        parse(tmp_path, change=unknown_operator)


class Timings:
    """A configuration and its timing cache, as far as a build touches them."""

    def __init__(self, *, accepts: Callable[[bytes], bool] = lambda known: True) -> None:
        self._accepts = accepts
        self.lent: list[bytes] = []

    def create_timing_cache(self, known: bytes) -> Any:
        return SimpleNamespace(known=known)

    def set_timing_cache(self, cache: Any, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        self.lent.append(cache.known)
        return self._accepts(cache.known)

    def get_timing_cache(self) -> Any:
        return SimpleNamespace(serialize=lambda: b"times")


def test_kernel_times_are_kept_for_the_next_build_on_such_a_gpu(tmp_path: Path) -> None:
    plan = PlanOptions(timing_cache=tmp_path / "times")
    cache = TimingCache.of(plan, version="10.16.0.72", gpu_name="NVIDIA H100 80GB HBM3")
    for expected in ([b""], [b"times"]):
        config = Timings()
        cache.lend(config)
        cache.keep(config)
        assert config.lent == expected
    (file,) = (tmp_path / "times").iterdir()
    assert file.name == "tensorrt-10.16.0.72-nvidia-h100-80gb-hbm3.timing"
    assert file.read_bytes() == b"times"


def test_times_of_another_library_are_begun_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = TimingCache(tmp_path / "t")
    (tmp_path / "t").write_bytes(b"foreign")
    config = Timings(accepts=lambda known: known == b"")
    cache.lend(config)
    assert config.lent == [b"foreign", b""]
    assert "begun anew" in caplog.text


def test_no_folder_keeps_nothing() -> None:
    cache = TimingCache.of(PlanOptions(), version="1", gpu_name="any")
    config = Timings()
    cache.lend(config)
    cache.keep(config)
    assert config.lent == []


def told(*layers: dict[str, str] | str) -> str:
    return json.dumps({"Layers": list(layers)})


def kernel(name: str, *nodes: str) -> dict[str, str]:
    return {
        "Name": name,
        "LayerType": "kgen",
        "Metadata": "\x1e".join(f"[ONNX Layer: {node}]" for node in nodes),
    }


def test_the_report_names_fused_and_unfused_attentions_of_each_profile() -> None:
    inspected = told(
        kernel("_gemm_mha_v2_myl0_3", "layers.0.attention"),
        kernel("__myl_MulSum_myl0_4", "layers.1.attention", "layers.1.attention.bthd"),
        kernel("_gemv_mha_v1_myl1_3 [profile 1]", "layers.0.attention"),
        kernel("_gemv_mha_v1_myl1_7 [profile 1]", "layers.1.attention"),
        kernel("head [profile 1]"),
    )
    report = report_layers(
        inspected, attentions=2, activation_bytes=(1000, 200), weight_errors={"layers.0.q": 0.1}
    )
    prefill, decode = report.profiles
    assert (prefill.profile, prefill.fused, prefill.unfused) == (
        "prefill", ("layers.0.attention",), ("layers.1.attention",),
    )  # fmt: skip
    assert (decode.profile, len(decode.fused), decode.unfused) == ("decode", 2, ())
    assert (prefill.activation_bytes, decode.activation_bytes) == (1000, 200)
    assert decode.layers[-1] == "head [profile 1]"
    assert read_report(report.encode()) == report


def test_without_metadata_a_kernel_for_each_attention_is_enough_and_fewer_are_not() -> None:
    both = told("_gemm_mha_v2_myl0_3", "_gemm_mha_v2_myl0_9", "head")
    one = told("_gemm_mha_v2_myl0_3", "head")
    names = [
        (len(report.profiles[0].fused), len(report.profiles[0].unfused))
        for report in (
            report_layers(text, attentions=2, activation_bytes=(1,), weight_errors={}) for text in (both, one)
        )
    ]
    assert names == [(2, 0), (0, 2)]


def test_layer_11_is_not_layer_1() -> None:
    inspected = told(kernel("_gemm_mha_v2_myl0_3", "layers.11.attention"))
    (prefill,) = report_layers(inspected, attentions=12, activation_bytes=(1,), weight_errors={}).profiles
    assert prefill.fused == ("layers.11.attention",)


@pytest.mark.parametrize("inspected", ["", "[]", "{}", '{"Layers": 3}'])
def test_an_inspector_that_tells_nothing_is_said_to(inspected: str) -> None:
    with pytest.raises(BuildError, match="tells no list of Layers"):
        report_layers(inspected, attentions=1, activation_bytes=(1,), weight_errors={})


@pytest.mark.parametrize("data", [b"", b"{}", b'{"profiles": [], "more": 1}', b"\xff"])
def test_a_report_is_read_strictly(data: bytes) -> None:
    with pytest.raises(BuildError, match=r"layers\.json: "):
        read_report(data)


class OpenedPlan:
    """An engine as far as its inspection goes."""

    def __init__(self, profiles: int = 2) -> None:
        self.num_optimization_profiles = profiles

    def get_device_memory_size_for_profile_v2(self, index: int) -> int:
        return (5000, 300)[index]

    def create_engine_inspector(self) -> Any:
        layers = told(kernel("_gemm_mha_v2_myl0_1", "layers.0.attention"))
        return SimpleNamespace(get_engine_information=lambda kind: layers)


def inspected_plan(engine: OpenedPlan) -> tuple[LayerReport, Any]:
    return inspect_plan(tensorrt_rtx, engine, options=OPTIONS, geometry=GEOMETRY, weight_errors={})


def test_an_opened_plan_tells_its_profiles() -> None:
    report, (prefill, decode) = inspected_plan(OpenedPlan())
    assert (prefill.rows, prefill.tokens, prefill.activation_bytes) == (1, 64, 5000)
    assert (decode.rows, decode.tokens, decode.activation_bytes) == (4, 1, 300)
    assert (decode.least_window, decode.window) == (256, OPTIONS.positions)
    assert [profile.unfused for profile in report.profiles] == [(), ("layers.0.attention",)]
    with pytest.raises(BuildError, match="plan: 1 optimization profiles, expected 2"):
        inspected_plan(OpenedPlan(profiles=1))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target": "vulkan"}, "target: must be one of onnxruntime, tensorrt, got 'vulkan'"),
        ({"precision": "int8"}, "precision: must be one of float16, bfloat16, int4 for tensorrt, got 'int8'"),
        ({"lanes": 2000}, "lanes: must be in 1 … 1024, got 2000"),
        ({"plan": PlanOptions(workspace_bytes=-1)}, "workspace_bytes: must be in 0 … "),
    ],
)
def test_options_no_plan_can_have_are_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(BuildError, match=said):
        check_options(DECODER, msgspec.structs.replace(OPTIONS, **changes), model="m", release=1)


def test_lanes_are_aligned_in_elements_of_two_bytes() -> None:
    narrow = random_decoder(
        kv_heads=1, query_heads=2, head_dim=2
    )  # 16 positions: 128 bytes in float32, 64 in float16
    options = msgspec.structs.replace(OPTIONS, max_seq_len=31, max_prefill_tokens=2)  # 32 positions
    check_options(narrow, msgspec.structs.replace(options, max_seq_len=63), model="m", release=1)
    with pytest.raises(BuildError, match="multiple of 256 bytes, got 128"):
        check_options(narrow, options, model="m", release=1)
    shared = random_decoder(kv_heads=3, query_heads=4)
    with pytest.raises(BuildError, match="query_heads: must be a multiple of kv_heads 3, got 4"):
        check_options(shared, OPTIONS, model="m", release=1)


def test_weights_are_mapped_not_copied(tmp_path: Path) -> None:
    graph = build_graph(DECODER, positions=OPTIONS.positions, precision="float16")
    write_weights(tmp_path / WEIGHTS_FILE, graph, progress=lambda stage, done: None)
    mapped = map_weights(tmp_path / WEIGHTS_FILE, graph)
    for weight in graph.weights:
        assert np.array_equal(mapped[weight.name], weight.array().reshape(-1).view(np.uint8))
        assert not mapped[weight.name].flags.owndata
