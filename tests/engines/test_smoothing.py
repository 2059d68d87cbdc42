"""Smoothing moves range without changing the function; calibration sees what the engine computes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engines.build import BuildOptions, build_release
from engines.calibration import DecoderRun, measure_inputs
from engines.contract import LaneId
from engines.decoder import Decoder
from engines.options import EngineOptions
from engines.smoothing import SmoothedDecoder, smooth
from tests.conftest import open_release
from tests.engines.random_decoder import random_decoder

EVERY_FEATURE = {"qkv_bias": True, "o_bias": True, "qk_norm": True, "attention_factor": 1.2}
TOKENS = np.arange(3, 60, 2)


def with_outliers(decoder: Decoder) -> Decoder:
    """The same function, with a few channels that are much larger than the rest, as in trained models."""
    weights = dict(decoder.weights)
    for maker, readers in _channels(decoder).items():
        factors = np.ones(len(weights[maker]), dtype=np.float32)
        factors[5::29] = 40
        for name in (maker, f"{maker}.bias"):
            if name in weights:
                weights[name] = weights[name] * (factors if weights[name].ndim == 1 else factors[:, None])
        for reader in readers:
            columns = weights[reader].shape[1]
            heads = columns // len(factors)  # values are read by every query head of a group
            weights[reader] = weights[reader] / _spread(factors, heads, decoder)
    return replace(decoder, weights=weights)


def _channels(decoder: Decoder) -> dict[str, tuple[str, ...]]:
    """What makes the input of linears, and which linears read it."""
    pairs: dict[str, tuple[str, ...]] = {} if decoder.config.tied_embedding else {"norm": ("lm_head",)}
    for layer in range(decoder.config.geometry.layers):
        p = f"layers.{layer}"
        pairs |= {f"{p}.attn_norm": (f"{p}.q", f"{p}.k", f"{p}.v"), f"{p}.mlp_norm": (f"{p}.gate", f"{p}.up")}
        pairs |= {f"{p}.v": (f"{p}.o",), f"{p}.up": (f"{p}.down",)}
    return pairs


def _spread(factors: np.ndarray, heads: int, decoder: Decoder) -> np.ndarray:
    if heads == 1:
        return factors
    return np.repeat(factors.reshape(-1, 1, decoder.config.geometry.head_dim), heads, axis=1).reshape(-1)


def hidden_of(decoder: Decoder) -> np.ndarray:
    """The normed residual stream after the last layer, by the calibration run."""
    run = DecoderRun(decoder, positions=len(TOKENS))
    stream = decoder.weights["embed"][TOKENS]
    for layer in range(decoder.config.geometry.layers):
        stream, _ = run.layer(stream, layer)
    return run.norm(stream, "norm")


def logits_of(decoder: Decoder, out: Path, precision: str = "fp32") -> np.ndarray:
    options = BuildOptions(precision=precision, lanes=1, max_seq_len=64, max_prefill_tokens=64)
    folder = build_release(decoder, out, model="m", release=1, options=options)
    engine = open_release(folder, EngineOptions(threads=2))
    logits = engine.prefill(LaneId(0), TOKENS, 0).array[0].copy()
    engine.close()
    return logits


@pytest.mark.parametrize("features", [{}, EVERY_FEATURE])
def test_calibration_computes_what_the_engine_does(features: dict[str, bool], tmp_path: Path) -> None:
    decoder = random_decoder(tied=False, **features)
    by_numpy = hidden_of(decoder)[-1] @ decoder.weights["lm_head"].T
    assert np.allclose(by_numpy, logits_of(decoder, tmp_path), atol=1e-3)


@pytest.mark.parametrize("features", [{}, EVERY_FEATURE, {"kv_heads": 1}])
def test_a_smoothed_decoder_is_the_same_function(features: dict[str, bool]) -> None:
    decoder = with_outliers(random_decoder(tied=False, **features))
    smoothed = smooth(decoder)
    assert smoothed.embed_divisor is None
    plain = hidden_of(decoder) @ decoder.weights["lm_head"].T
    again = hidden_of(smoothed.decoder) @ smoothed.decoder.weights["lm_head"].T
    assert np.allclose(plain, again, rtol=1e-4, atol=1e-4)
    changed = [
        name
        for name in decoder.weights
        if not np.array_equal(decoder.weights[name], smoothed.decoder.weights[name])
    ]
    assert {
        "norm",
        "lm_head",
        "layers.0.attn_norm",
        "layers.1.v",
        "layers.1.o",
        "layers.0.up",
        "layers.0.down",
    } <= set(changed)
    assert "embed" not in changed


def test_factors_are_powers_of_two() -> None:
    decoder = with_outliers(random_decoder(tied=False))
    smoothed = smooth(decoder).decoder
    ratios = np.concatenate(
        [
            decoder.weights[name] / smoothed.weights[name]
            for name in ("norm", "layers.0.attn_norm", "layers.1.mlp_norm")
        ]
    )
    assert (np.log2(ratios) == np.rint(np.log2(ratios))).all()
    assert ratios.max() > ratios.min()


def test_a_tied_embedding_is_multiplied_and_says_by_what() -> None:
    plain = random_decoder()
    uneven = np.where(np.arange(128) % 29 == 5, np.float32(40), np.float32(1))
    decoder = replace(plain, weights=dict(plain.weights) | {"norm": plain.weights["norm"] * uneven})
    smoothed = smooth(decoder)
    assert smoothed.embed_divisor is not None
    assert smoothed.embed_divisor[5] > smoothed.embed_divisor[6]
    embed = smoothed.decoder.weights["embed"]
    assert np.array_equal(embed / smoothed.embed_divisor, decoder.weights["embed"])
    assert not np.array_equal(embed, decoder.weights["embed"])


@pytest.mark.parametrize(("precision", "share"), [("int8", 0.2), ("int4", 0.6)])
def test_quantised_engines_are_nearer_to_the_float_one(
    precision: str, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoders = [with_outliers(random_decoder(tied=False, seed=seed)) for seed in range(4)]
    exact = [logits_of(decoder, tmp_path) for decoder in decoders]

    def error() -> float:
        made = [logits_of(decoder, tmp_path, precision) for decoder in decoders]
        return float(
            np.mean([np.square(a - b).mean() / np.square(b).mean() for a, b in zip(made, exact, strict=True)])
        )

    smoothed = error()
    monkeypatch.setattr(
        "engines.build_onnxruntime.smooth", lambda decoder: SmoothedDecoder(decoder, embed_divisor=None)
    )
    assert smoothed < share * error()


@pytest.mark.parametrize("scale", [0.0, np.nan, np.inf])
def test_sizes_that_are_no_numbers_leave_weights_alone(scale: float) -> None:
    decoder = random_decoder()
    broken = replace(
        decoder, weights=dict(decoder.weights) | {"norm": decoder.weights["norm"] * np.float32(scale)}
    )
    with np.errstate(all="ignore"):
        divisor = smooth(broken).embed_divisor
    assert np.array_equal(divisor, np.ones(decoder.config.geometry.hidden))


def test_sizes_are_root_mean_squares_per_channel() -> None:
    decoder = random_decoder()
    seen = measure_inputs(decoder, "hello there")
    assert len(seen.layers) == 2
    assert seen.layers[0].attention.shape == (128,)
    assert seen.layers[0].down.shape == (256,)
    norms = decoder.weights["layers.0.attn_norm"]
    assert np.sqrt(np.mean((seen.layers[0].attention / norms) ** 2)) == pytest.approx(1, abs=1e-3)
