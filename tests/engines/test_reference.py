"""Both graph targets against an independent reference: transformers' own models on torch CPU, in float32."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
import torch
import transformers
from onnx import helper

from engines.decoder import Decoder
from engines.gguf import demo_gguf, load_gguf
from engines.graph_onnxruntime import build_onnxruntime_graph
from engines.graph_tensorrt import build_graph
from engines.huggingface import load_huggingface
from engines.onnx_emit import EmittedGraph
from tests.engines.graph_runs import IDLE, GraphRun, open_session
from tests.engines.tiny_models import MODELS, VOCAB, open_reference, save_tiny

TARGETS = ("onnxruntime", "tensorrt")
POSITIONS = 288  # S of every graph here; the last one is scratch
CACHED = (0, 1, 31, 32, 33)
SEQUENCE = 48
TOLERANCE = 1e-3

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Case:
    """A decoder, a token sequence and the reference's logits [SEQUENCE, V] of it."""

    decoder: Decoder
    tokens: list[int]
    logits: Floats
    tolerance: float


def build(decoder: Decoder, target: str) -> EmittedGraph:
    if target == "tensorrt":
        return build_graph(decoder, positions=POSITIONS, precision="float32")
    return build_onnxruntime_graph(decoder, positions=POSITIONS, precision="fp32")


def new_run(graph: EmittedGraph, case: Case, *, lanes: int) -> GraphRun:
    return GraphRun(open_session(graph), case.decoder.config.geometry, lanes=lanes, positions=POSITIONS)


def reference_logits(model: Any, tokens: list[int]) -> Floats:
    with torch.no_grad():
        return np.asarray(model(torch.tensor([tokens])).logits[0].float().numpy())


def worst(found: Floats, expected: Floats) -> float:
    return float(np.abs(found - expected).max())


def check_logits(run: GraphRun, case: Case) -> None:
    """One query and several, after every length of cache, with poison wherever nothing was written."""
    for cached in CACHED:
        for length in (1, 5):
            run.poison()
            if cached:
                first = run.step([case.tokens[:cached]], [0])[0]
                assert worst(first, case.logits[:cached]) < case.tolerance, f"prefill of {cached}"
            end = cached + length
            found = run.step([case.tokens[cached:end]], [cached])[0]
            assert worst(found, case.logits[cached:end]) < case.tolerance, f"{length} after {cached} cached"


def check_idle_rows(run: GraphRun, case: Case) -> None:
    """Decode rows 0 and 2 while row 1 is idle: they answer rightly, and row 1 keeps its bytes."""
    assert run.lanes == 3
    filled = (7, 33, 20)
    run.poison()
    for lane, length in enumerate(filled):
        run.step([case.tokens[:length]], [0], first_lane=lane)
    before = run.kv[:, :, 1, :, : run.scratch].copy()
    starts = [filled[0], IDLE, filled[2]]
    found = run.step([[case.tokens[filled[0]]], [0], [case.tokens[filled[2]]]], starts)
    for lane in (0, 2):
        assert worst(found[lane, 0], case.logits[filled[lane]]) < case.tolerance, f"decode of lane {lane}"
    assert np.array_equal(before, run.kv[:, :, 1, :, : run.scratch]), "the idle lane was changed"


# -- real weights --


def as_transformers(decoder: Decoder) -> Any:
    """The same weights in transformers' Llama, placed by its own parameter names."""
    c, g = decoder.config, decoder.config.geometry
    config = transformers.LlamaConfig(
        vocab_size=g.vocab_size, hidden_size=g.hidden, intermediate_size=c.ffn, num_hidden_layers=g.layers,
        num_attention_heads=g.query_heads, num_key_value_heads=g.kv_heads, head_dim=g.head_dim,
        rms_norm_eps=c.norm_eps, rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        max_position_embeddings=c.context, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    names = {
        "self_attn.q_proj": "q", "self_attn.k_proj": "k", "self_attn.v_proj": "v", "self_attn.o_proj": "o",
        "mlp.gate_proj": "gate", "mlp.up_proj": "up", "mlp.down_proj": "down", "input_layernorm": "attn_norm",
        "post_attention_layernorm": "mlp_norm",
    }  # fmt: skip
    state = {"model.embed_tokens.weight": "embed", "model.norm.weight": "norm", "lm_head.weight": "embed"}
    for layer in range(g.layers):
        state |= {f"model.layers.{layer}.{a}.weight": f"layers.{layer}.{b}" for a, b in names.items()}
    model.load_state_dict({a: torch.from_numpy(np.array(decoder.weights[b])) for a, b in state.items()})
    return model


@pytest.fixture(scope="module")
def smollm2() -> Case:
    decoder = load_gguf(demo_gguf())
    rng = np.random.default_rng(5)
    tokens = [int(token) for token in rng.integers(0, decoder.config.geometry.vocab_size, SEQUENCE)]
    return Case(decoder, tokens, reference_logits(as_transformers(decoder), tokens), TOLERANCE)


@pytest.mark.parametrize("target", TARGETS)
def test_real_weights_agree_with_the_reference(smollm2: Case, target: str) -> None:
    graph = build(smollm2.decoder, target)
    run = new_run(graph, smollm2, lanes=3)
    check_logits(run, smollm2)
    check_idle_rows(run, smollm2)


# -- every architecture, small and random --


def load_case(folder: Path) -> Case:
    decoder = load_huggingface(folder, max_seq_len=64)
    tokens = [int(token) for token in np.random.default_rng(6).integers(0, VOCAB, SEQUENCE)]
    return Case(decoder, tokens, reference_logits(open_reference(folder), tokens), 2e-4)


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_agrees_with_the_reference(tmp_path: Path, name: str) -> None:
    case = load_case(save_tiny(name, tmp_path))
    assert np.abs(case.logits).max() > 1, "logits too small for the tolerance to mean anything"
    for target in TARGETS:
        run = new_run(build(case.decoder, target), case, lanes=3)
        check_logits(run, case)
        check_idle_rows(run, case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_shards_load_exactly(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = save_tiny("qwen3", tmp_path, dtype=dtype, shards=True)
    assert (folder / "model.safetensors.index.json").is_file()
    case = load_case(folder)
    for target in TARGETS:
        check_logits(new_run(build(case.decoder, target), case, lanes=3), case)


def test_float16_tensorrt_graph_stays_near_the_reference(tmp_path: Path) -> None:
    case = replace(load_case(save_tiny("llama", tmp_path)), tolerance=0.1)
    graph = build_graph(case.decoder, positions=POSITIONS, precision="float16")
    geometry = case.decoder.config.geometry
    run = GraphRun(
        open_session(graph), geometry, lanes=3, positions=POSITIONS, kv_dtype=np.float16, poison=100
    )
    check_logits(run, case)
    check_idle_rows(run, case)


@pytest.mark.parametrize("target", TARGETS)
def test_a_thousand_random_steps_touch_only_their_lanes(tiny: Case, target: str) -> None:
    rng = np.random.default_rng(8)
    run = new_run(build(tiny.decoder, target), tiny, lanes=4)
    lengths = np.zeros(run.lanes, dtype=np.int64)
    for step in range(1000):
        before = run.kv.copy()
        if step % 4 == 0:  # a part of a prefill into one lane, from the start where it is full
            active = rng.choice(run.lanes, 1)
            count = int(rng.integers(1, 9))
            lengths[active] = np.where(lengths[active] + count > SEQUENCE, 0, lengths[active])
            starts, first = lengths[active], int(active[0])
        else:
            active = np.flatnonzero((rng.random(run.lanes) < 0.6) & (lengths < SEQUENCE))
            if not active.size:
                continue
            count, first = 1, 0
            starts = np.where(np.isin(np.arange(active[-1] + 1), active), lengths[: active[-1] + 1], IDLE)
        rows = [tiny.tokens[start : start + count] if start != IDLE else [0] for start in starts]
        found = run.step(rows, starts.tolist(), first_lane=first)
        for lane in active:
            written = slice(lengths[lane], lengths[lane] + count)
            assert worst(found[lane - first], tiny.logits[written]) < tiny.tolerance, f"step {step}"
            before[:, :, lane, :, written] = run.kv[:, :, lane, :, written]
            lengths[lane] += count
        resting = slice(None, run.scratch)
        if target == "onnxruntime":  # its doubled single query lands one past the end, to be overwritten
            for lane in active:
                before[:, :, lane, :, lengths[lane]] = run.kv[:, :, lane, :, lengths[lane]]
        assert np.array_equal(before[..., resting, :], run.kv[..., resting, :]), f"step {step}"


# -- the checks can fail --


def insert(graph: EmittedGraph, *, reader: str, tensor: str, nodes: list[onnx.NodeProto]) -> EmittedGraph:
    """A copy in which the node named `reader` reads what the last of `nodes` makes instead of `tensor`."""
    model = onnx.ModelProto()
    model.CopyFrom(graph.model)
    index, node = next((i, node) for i, node in enumerate(model.graph.node) if node.name == reader)
    place = list(node.input).index(tensor)
    node.input[place] = nodes[-1].output[0]
    for offset, extra in enumerate(nodes):
        model.graph.node.insert(index + offset, extra)
    return EmittedGraph(model=model, weights=graph.weights)


def upper_left_mask(graph: EmittedGraph) -> EmittedGraph:
    """Queries count from 0, as a causal flag without an offset does: right for a first prefill only."""
    zero = helper.make_node("Sub", ["write_indices", "write_indices"], ["mutant.zero"])
    if any(node.op_type == "GroupQueryAttention" for node in graph.model.graph.node):
        cast = helper.make_node("Cast", ["mutant.zero"], ["mutant.zero.int32"], to=onnx.TensorProto.INT32)
        return insert(graph, reader="valid", tensor="written", nodes=[zero, cast])
    column = helper.make_node("Unsqueeze", ["write_indices", "ints.-1"], ["mutant.column"])
    relative = helper.make_node("Sub", ["position_ids", "mutant.column"], ["mutant.positions"])
    return insert(graph, reader="queries.4d", tensor="position_ids", nodes=[column, relative])


def ignored_cache(graph: EmittedGraph) -> EmittedGraph:
    """The values of layer 1 come from a cache of zeros."""
    reader = next(node.name for node in graph.model.graph.node if "past_value_1" in node.input)
    empty = helper.make_node("Sub", ["past_value_1", "past_value_1"], ["mutant.empty"])
    return insert(graph, reader=reader, tensor="past_value_1", nodes=[empty])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return load_case(save_tiny("llama", tmp_path_factory.mktemp("llama")))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("mutate", [upper_left_mask, ignored_cache])
def test_a_wrong_graph_is_caught(
    tiny: Case, target: str, mutate: Callable[[EmittedGraph], EmittedGraph]
) -> None:
    graph = build(tiny.decoder, target)
    check_logits(new_run(graph, tiny, lanes=1), tiny)
    run = new_run(mutate(graph), tiny, lanes=1)
    with pytest.raises(AssertionError, match="1 after 1 cached"):
        check_logits(run, tiny)


@pytest.mark.parametrize("target", TARGETS)
def test_idle_rows_writing_at_zero_are_caught(tiny: Case, target: str) -> None:
    run = new_run(build(tiny.decoder, target), tiny, lanes=3)
    run.idle_write, run.idle_queries = 0, 1
    with pytest.raises(AssertionError, match="the idle lane was changed"):
        check_idle_rows(run, tiny)
