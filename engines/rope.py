"""Rotary position embedding: from a model's scaling settings to final frequencies, and from those to tables.

Formulas follow the reference implementation of Hugging Face transformers (`modeling_rope_utils`); YaRN is
Peng et al. 2023 (arXiv 2309.00071), `llama3` is the scaling of Llama 3.1. Frequencies are rounded to float32,
the precision the models were trained with.
"""

import math
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from engines.errors import BuildError

FloatArray: TypeAlias = npt.NDArray[np.float64]

SUPPORTED = "default, linear, llama3, yarn, and dynamic within max_position_embeddings"


class RopeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`rope_parameters` (once `rope_scaling`) of config.json; which fields are needed depends on the type."""

    rope_theta: float
    rope_type: str = "default"
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    partial_rotary_factor: float = 1.0


def parse_rope(parameters: dict[str, Any], *, default_theta: float) -> RopeSettings:
    """Read `rope_parameters`, with `type` as an old spelling of `rope_type`; BuildError names a wrong key."""
    known = {"rope_theta": default_theta, **parameters}
    old_type = known.pop("type", None)
    if old_type is not None:
        known.setdefault("rope_type", old_type)
    try:
        settings = msgspec.convert(known, RopeSettings)
    except msgspec.ValidationError as error:
        raise BuildError(f"rope_parameters: {error}; supported types: {SUPPORTED}") from None
    if settings.partial_rotary_factor != 1.0:
        raise BuildError(
            f"rope_parameters.partial_rotary_factor: {settings.partial_rotary_factor}, supported: 1.0"
        )
    if not (math.isfinite(settings.rope_theta) and settings.rope_theta > 1):
        raise BuildError(f"rope_theta: {settings.rope_theta}, supported: a finite number above 1")
    return settings


def default_frequencies(theta: float, head_dim: int) -> FloatArray:
    """theta^(−2i/D) for i = 0 … D/2−1, unscaled."""
    return np.asarray(1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim))


def scaled_frequencies(
    settings: RopeSettings, *, head_dim: int, max_position_embeddings: int, max_seq_len: int
) -> tuple[tuple[float, ...], float]:
    """Final inverse frequencies [D/2] and the factor that cos and sin are multiplied by.

    `dynamic` changes its frequencies once a sequence outgrows max_position_embeddings, which would change KV
    already written; within that length it is the default, so it is accepted only if max_seq_len fits.
    """
    plain = default_frequencies(settings.rope_theta, head_dim)
    original = settings.original_max_position_embeddings or max_position_embeddings
    attention_factor = 1.0
    match settings.rope_type:
        case "default":
            scaled = plain
        case "dynamic":
            if max_seq_len > max_position_embeddings:
                raise BuildError(
                    f"rope_parameters.rope_type: dynamic with max_seq_len {max_seq_len}, "
                    f"supported: max_seq_len up to max_position_embeddings = {max_position_embeddings}"
                )
            scaled = plain
        case "linear":
            scaled = plain / _needed(settings, "factor")
        case "llama3":
            scaled = _llama3(settings, plain, original)
        case "yarn":
            scaled = _yarn(settings, plain, original)
            attention_factor = _yarn_attention_factor(settings)
        case other:
            raise BuildError(f"rope_parameters.rope_type: {other}, supported: {SUPPORTED}")
    return tuple(float(value) for value in scaled.astype(np.float32)), attention_factor


def rotary_tables(
    inv_freq: tuple[float, ...], positions: int, attention_factor: float
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Tables cos and sin, [positions, D/2] float32; angles are float32 products, as in the reference."""
    frequencies = np.asarray(inv_freq, dtype=np.float32)
    angles = (np.arange(positions, dtype=np.float32)[:, None] * frequencies[None, :]).astype(np.float64)
    cos = np.cos(angles) * attention_factor
    sin = np.sin(angles) * attention_factor
    return cos.astype(np.float32), sin.astype(np.float32)


def _llama3(settings: RopeSettings, plain: FloatArray, original: int) -> FloatArray:
    """Keep short wavelengths, divide long ones by `factor`, blend in between."""
    factor = _needed(settings, "factor")
    low, high = _needed(settings, "low_freq_factor"), _needed(settings, "high_freq_factor")
    if high <= low:
        raise BuildError(f"rope_parameters.high_freq_factor: {high}, supported: above low_freq_factor {low}")
    wavelength = 2 * math.pi / plain
    blend = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    return np.asarray((1 - blend) * plain / factor + blend * plain)


def _yarn(settings: RopeSettings, plain: FloatArray, original: int) -> FloatArray:
    """Interpolate slow dimensions, extrapolate fast ones, with a linear ramp between two rotation counts."""
    factor = _needed(settings, "factor")
    dim, theta = 2 * len(plain), settings.rope_theta

    def dimension_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(settings.beta_fast or 32.0), dimension_of(settings.beta_slow or 1.0)
    if settings.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    ramp = np.clip((np.arange(dim // 2) - low) / width, 0.0, 1.0)
    return np.asarray(plain / factor * ramp + plain * (1 - ramp))


def _yarn_attention_factor(settings: RopeSettings) -> float:
    if settings.attention_factor is not None:
        return settings.attention_factor
    factor = _needed(settings, "factor")

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if settings.mscale and settings.mscale_all_dim:
        return scale(settings.mscale) / scale(settings.mscale_all_dim)
    return scale(1.0)


def _needed(settings: RopeSettings, name: str) -> float:
    value = getattr(settings, name)
    if value is None or not math.isfinite(value) or value <= 0:
        raise BuildError(
            f"rope_parameters.{name}: {value}, supported for {settings.rope_type}: a finite number above 0"
        )
    return float(value)
