"""Decoders behind one Engine protocol: build, sign, verify, publish, load and open them.

A model's life, and the name in this face that starts each part of it:

    build_release       weights → a release folder: graph, tokenizer.json, engine.json      (needs the `tools` extra)
    sign_release        a private key vouches for every byte of it                          (keys: generate_signing_key)
    publish_release     into a model's version folder, as the current one, whole or not at all
    load_release        verified bytes in memory
    open_engine         a warm engine that answered its golden token

Security
- A release is executable content: whoever can make this process load one runs code in it. So nothing in it is
  parsed by a runtime before a trusted key's signature, and the digest of the very bytes, were checked; engines are
  opened only from a `VerifiedRelease`, never from a path. There is no switch to skip this, and without keys nothing
  loads.
- The signature protects against whoever can write to the model repository or load models into the server. It does
  not protect against whoever holds a private key, can write the node's trust settings, or runs as the same user:
  those are inside the boundary.
- An old release stays validly signed for ever. `TrustSettings.min_release` is what stops a roll-back to one that
  turned out to be bad; `current` alone cannot, as it is not signed.
- A signature says nothing about secrecy: weights and tokenizer lie readable on disk.

Importing this package is light: no ONNX, no runtime, no builder, no GPU library; each is imported by the call that
needs it. Never imports cachemgr or backend.
"""

from typing import TYPE_CHECKING, Any

from engines.contract import Engine, EngineSpec, Geometry, LaneId, Logits
from engines.errors import BuildError, EngineError, ReleaseError, StepError
from engines.lanes import LanePool
from engines.loading import VerifiedRelease, current_digest, load_release, load_release_dir
from engines.manifest import EngineManifest
from engines.opening import open_engine
from engines.options import EngineOptions
from engines.publishing import publish_release
from engines.signing import generate_signing_key, sign_release
from engines.trust import TrustSettings

if TYPE_CHECKING:
    from engines.build import build_release

__all__ = [
    "BuildError",
    "Engine",
    "EngineError",
    "EngineManifest",
    "EngineOptions",
    "EngineSpec",
    "Geometry",
    "LaneId",
    "LanePool",
    "Logits",
    "ReleaseError",
    "StepError",
    "TrustSettings",
    "VerifiedRelease",
    "build_release",
    "current_digest",
    "generate_signing_key",
    "load_release",
    "load_release_dir",
    "open_engine",
    "publish_release",
    "sign_release",
]


def __getattr__(name: str) -> Any:
    """`build_release` comes with the builders' libraries, which serving hosts do not install: imported on first use."""
    if name == "build_release":
        from engines.build import build_release

        return build_release
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
