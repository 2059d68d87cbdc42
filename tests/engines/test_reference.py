"""Both graph targets against an independent reference: transformers' own models on torch CPU, in float32."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
import torch
import transformers
from onnx import helper, numpy_helper

from engines.decoder import Decoder
from engines.gguf import demo_gguf, load_gguf
from engines.graph_onnxruntime import build_onnxruntime_graph
from engines.graph_tensorrt import build_graph
from engines.huggingface import load_huggingface
from engines.onnx_emit import EmittedGraph
from tests.engines.graph_runs import IDLE, POISON, GraphRun, open_session

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
            run.kv[:] = POISON
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
    run.kv[:] = POISON
    for lane, length in enumerate(filled):
        run.step([case.tokens[:length]], [0], first_lane=lane)
    before = run.kv[:, :, 1, :, : run.scratch].copy()
    starts = [filled[0], IDLE, filled[2]]
    found = run.step([[case.tokens[filled[0]]], [0], [case.tokens[filled[2]]]], starts)
    for lane in (0, 2):
        assert worst(found[lane, 0], case.logits[filled[lane]]) < case.tolerance, f"decode of lane {lane}"
    assert np.array_equal(before, run.kv[:, :, 1, :, : run.scratch]), "the idle lane was changed"


# -- real weights ------------------------------------------------------------------------------------------------------


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
def smollm2() -> Iterator[Case]:
    decoder = load_gguf(demo_gguf())
    rng = np.random.default_rng(5)
    tokens = [int(token) for token in rng.integers(0, decoder.config.geometry.vocab_size, SEQUENCE)]
    yield Case(decoder, tokens, reference_logits(as_transformers(decoder), tokens), TOLERANCE)


@pytest.mark.parametrize("target", TARGETS)
def test_real_weights_agree_with_the_reference(smollm2: Case, target: str) -> None:
    graph = build(smollm2.decoder, target)
    run = new_run(graph, smollm2, lanes=3)
    check_logits(run, smollm2)
    check_idle_rows(run, smollm2)
