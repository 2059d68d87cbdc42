"""Which attentions of a plan run as one fused kernel, per profile, and what memory a step takes.

An attention that no fused kernel takes runs as several, with its whole score matrix in memory: slower, and a
reason why activations may bound the length of a prefill. Only TensorRT's engine inspector tells.

Its compiler names a fused attention after the kernel (`_gemm_mha_v2_…` for many queries, `_gemv_mha_v1_…` for
one) and, where it keeps metadata, lists the graph's nodes that went into it. Layers of the second profile are
marked in their names. All this is as published for TensorRT 10; no GPU was at hand to see it.
"""

import json
import re
from typing import Any, Final

import msgspec

from engines.errors import BuildError

REPORT_FILE: Final = "layers.json"
PROFILES: Final = ("prefill", "decode")

_FUSED = re.compile(r"mha|flash", re.IGNORECASE)
_ATTENTION = re.compile(r"\blayers\.\d+\.attention(?!\.)")
_PROFILE = re.compile(r"\[profile (\d+)\]")


class ProfileLayers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One optimization profile: its attentions by the graph's names, and every layer the plan runs for it."""

    profile: str
    fused: tuple[str, ...]
    unfused: tuple[str, ...]
    activation_bytes: int
    layers: tuple[str, ...]


class LayerReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of layers.json. `weight_errors`: ‖rounded − exact‖ / ‖exact‖ of each weight in 4 bits."""

    profiles: tuple[ProfileLayers, ...]
    weight_errors: dict[str, float] = {}

    def encode(self) -> bytes:
        """The file."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


def read_report(data: bytes) -> LayerReport:
    """Decode layers.json; BuildError if it is none."""
    try:
        return msgspec.json.decode(data, type=LayerReport)
    except (msgspec.DecodeError, ValueError) as error:
        raise BuildError(f"{REPORT_FILE}: {error}") from None


def report_layers(
    inspected: str, *, attentions: int, activation_bytes: tuple[int, ...], weight_errors: dict[str, float]
) -> LayerReport:
    """The report from the inspector's JSON, for a decoder of that many attentions; bytes are per profile."""
    layers = [_Layer.read(entry) for entry in _entries(inspected)]
    names = tuple(f"layers.{layer}.attention" for layer in range(attentions))
    profiles = [
        _profile(PROFILES[index], [layer for layer in layers if layer.profile == index], names, nbytes)
        for index, nbytes in enumerate(activation_bytes)
    ]
    return LayerReport(profiles=tuple(profiles), weight_errors=weight_errors)


class _Layer(msgspec.Struct, frozen=True):
    name: str
    kernel: str
    origin: str
    profile: int

    @classmethod
    def read(cls, entry: Any) -> "_Layer":
        """From an object of detailed verbosity, or a bare name of the lesser one."""
        fields = entry if isinstance(entry, dict) else {"Name": entry}
        name, kernel, origin = (str(fields.get(key, "")) for key in ("Name", "TacticName", "Metadata"))
        marked = _PROFILE.search(name)
        return cls(name=name, kernel=kernel, origin=origin, profile=int(marked[1]) if marked else 0)

    @property
    def is_fused_attention(self) -> bool:
        """Is its kernel one that computes a whole attention?"""
        return bool(_FUSED.search(self.name) or _FUSED.search(self.kernel))


def _entries(inspected: str) -> list[Any]:
    try:
        layers = json.loads(inspected)["Layers"]
    except (ValueError, KeyError, TypeError):
        layers = None
    if not isinstance(layers, list):
        raise BuildError("layers: the engine inspector tells no list of Layers")
    return layers


def _profile(profile: str, layers: list[_Layer], names: tuple[str, ...], nbytes: int) -> ProfileLayers:
    kernels = [layer for layer in layers if layer.is_fused_attention]
    told = {name for layer in kernels for name in _ATTENTION.findall(f"{layer.name} {layer.origin}")}
    if not told and len(kernels) >= len(names):
        told = {*names}  # no metadata: a kernel for each is all that can be said, and is enough
    return ProfileLayers(
        profile=profile,
        fused=tuple(name for name in names if name in told),
        unfused=tuple(name for name in names if name not in told),
        activation_bytes=nbytes,
        layers=tuple(layer.name for layer in layers),
    )
