"""What a plan must be before anything is bound to it: tensors, aliases, profiles."""

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from engines.contract import EngineSpec, Geometry
from engines.device_memory import DeviceNeed, device_need, require_device_memory
from engines.engine_spec import engine_spec, kv_type
from engines.manifest import FileEntry, ProfileInfo, TensorRTInfo
from engines.options import EngineOptions
from engines.tensorrt_plan import (
    Profile,
    cache_names,
    check_aliases,
    check_tensors,
    choose_profiles,
    expected_tensors,
)
from tests.engines.conftest import refusal, tiny_manifest

SPEC = engine_spec(
    tiny_manifest({}, kv_dtype="float16", lanes=4, max_seq_len=500),
    EngineOptions(),
    "d",
    kv_identity=bytes(16),
)
Tensors = dict[str, tuple[str, tuple[int | str, ...]]]


def found(
    change: Callable[[Tensors, Tensors], None] = lambda inputs, outputs: None,
) -> tuple[Tensors, Tensors]:
    """A plan's own tensors: open sizes are −1."""
    inputs, outputs = (
        {
            name: (kind, tuple(-1 if isinstance(size, str) else size for size in shape))
            for name, (kind, shape) in d.items()
        }
        for d in expected_tensors(SPEC, "float16")
    )
    change(inputs, outputs)
    return inputs, outputs


def test_the_contracts_plan_is_accepted() -> None:
    check_tensors(SPEC, "float16", *found())


def test_a_plan_may_have_settled_that_one_row_of_logits_is_wanted() -> None:
    def settled(inputs: Tensors, outputs: Tensors) -> None:
        outputs["logits"] = ("float32", (-1, 1, 100))

    check_tensors(SPEC, "float16", *found(settled))


@pytest.mark.parametrize(
    ("change", "expected", "said"),
    [
        (lambda i, o: i.pop("kv_positions"), "input kv_positions int64 [W]", "none"),
        (lambda i, o: i.update(query_lens=("int32", (-1,))), "input query_lens none", "int32 [-1]"),
        (
            lambda i, o: i.update(input_ids=("int32", (-1, -1))),
            "input input_ids int64 [B, T]",
            "int32 [B, T]",
        ),
        (lambda i, o: i.update(input_ids=("int64", (1, -1))), "input input_ids int64 [B, T]", "int64 [1, T]"),
        (
            lambda i, o: i.update(past_key_1=("bfloat16", (-1, 2, 512, 16))),
            "input past_key_1 float16 [B, 2, 512, 16]",
            "bfloat16 [B, 2, 512, 16]",
        ),
        (
            lambda i, o: o.update(present_value_0=("float16", (-1, 2, 256, 16))),
            "output present_value_0 float16 [B, 2, 512, 16]",
            "float16 [B, 2, 256, 16]",
        ),
        (
            lambda i, o: o.update(logits=("float16", (-1, -1, 100))),
            "output logits float32 [B, R, 100]",
            "float16 [B, R, 100]",
        ),
        (
            lambda i, o: o.update(logits=("float32", (-1, 100))),
            "output logits float32 [B, R, 100]",
            "float32 [-1, 100]",
        ),
    ],
)
def test_another_plan_is_refused_by_tensor(
    change: Callable[[Tensors, Tensors], None], expected: str, said: str
) -> None:
    error = refusal(lambda: check_tensors(SPEC, "float16", *found(change)))
    assert (error.step, error.expected, error.found) == ("contract", expected, said)


@pytest.mark.parametrize("alias", [None, "past_key_0"])
def test_a_present_elsewhere_is_refused(alias: str | None) -> None:
    aliases: dict[str, str | None] = {present: past for past, present in cache_names(SPEC)}
    check_aliases(SPEC, aliases)
    aliases["present_value_1"] = alias
    error = refusal(lambda: check_aliases(SPEC, aliases))
    assert error.expected == "output present_value_1 in the memory of past_value_1"
    assert error.found == (alias or "memory of its own")


PREFILL = Profile(index=0, rows=1, tokens=(1, 32, 64), window=(256, 512))
DECODE = Profile(index=1, rows=4, tokens=(1, 1, 1), window=(256, 512))


def test_profiles_are_told_by_their_shapes() -> None:
    assert choose_profiles([PREFILL, DECODE], SPEC) == (PREFILL, DECODE)
    assert choose_profiles([DECODE, PREFILL], SPEC) == (PREFILL, DECODE)


@pytest.mark.parametrize(
    "profiles",
    [
        [],
        [PREFILL],
        [DECODE],
        [PREFILL, Profile(index=1, rows=3, tokens=(1, 1, 1), window=(256, 512))],
        [Profile(index=0, rows=1, tokens=(1, 32, 63), window=(256, 512)), DECODE],
        [Profile(index=0, rows=1, tokens=(2, 32, 64), window=(256, 512)), DECODE],
        [PREFILL, Profile(index=1, rows=4, tokens=(1, 1, 1), window=(512, 512))],
        [PREFILL, Profile(index=1, rows=4, tokens=(1, 1, 1), window=(256, 511))],
    ],
)
def test_profiles_without_room_are_refused(profiles: list[Profile]) -> None:
    error = refusal(lambda: choose_profiles(profiles, SPEC))
    assert error.step == "contract"
    assert (
        "prefills of 1 … 64 tokens and another for decodes of 1 … 4 lanes, windows up to 512"
        in error.expected
    )
    assert error.found.count("rows of") == len(profiles)


def test_one_profile_is_not_both() -> None:
    both = Profile(index=0, rows=4, tokens=(1, 1, 64), window=(256, 512))
    assert refusal(lambda: choose_profiles([both], SPEC)).step == "contract"
    assert choose_profiles([both, DECODE], SPEC) == (both, DECODE)


def need_of(spec: EngineSpec, *, adopts: bool = False, cuda_graphs: bool = False) -> DeviceNeed:
    profile = ProfileInfo(rows=1, tokens=64, least_window=256, window=512, activation_bytes=7000)
    small = msgspec.structs.replace(profile, activation_bytes=3)
    info = TensorRTInfo(version="10.15.1", compute_capability="9.0", gpu_name="g", profiles=(profile, small))
    manifest = msgspec.structs.replace(
        tiny_manifest({}), graph="p", files={"p": FileEntry("0" * 64, 12345)}, tensorrt=info
    )
    return device_need(spec, manifest, adopts=adopts, cuda_graphs=cuda_graphs)


def test_need_is_weights_activations_lanes_and_logits() -> None:
    lane = 2 * 2 * 2 * 512 * 16 * 2  # k|v, layers, heads, S, head_dim, bytes
    need = need_of(SPEC)
    assert (need.weights, need.activations, need.kv, need.buffers) == (12345, 7000, 4 * lane, 2 * 4 * 100 * 4)
    assert need.total == 12345 + 7000 + 4 * lane + 3200
    graphs = need_of(SPEC, cuda_graphs=True).graphs
    assert (need.graphs, graphs) == (0, 3 * 2 * 2 * 160 * 1024)  # rows 1, 2, 4 in windows 256, 512; layers
    adopting = need_of(SPEC, adopts=True)
    assert adopting.kv == lane + 4 * (lane // 4)  # one lane, and one layer's keys of all


def test_what_does_not_fit_is_refused_with_both_sizes() -> None:
    need = need_of(SPEC)
    require_device_memory(need, free=need.total)
    error = refusal(lambda: require_device_memory(need, free=need.total - 1))
    assert error.step == "gpu_memory"
    assert f"{need.total} bytes of device memory (weights 12345, activations 7000, " in error.expected
    assert error.found == f"{need.total - 1} bytes free"


def test_kv_types_are_as_wide_as_they_are() -> None:
    assert kv_type("float16") == np.float16
    assert (kv_type("bfloat16").name, kv_type("bfloat16").itemsize) == ("bfloat16", 2)


def test_geometry_of_the_test() -> None:
    assert SPEC.geometry == Geometry(
        layers=2, hidden=64, query_heads=4, kv_heads=2, head_dim=16, vocab_size=100
    )
    assert (SPEC.positions, SPEC.max_prefill_tokens) == (512, 64)
