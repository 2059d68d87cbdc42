"""Decoders behind one Engine protocol: build, sign, verify, load, prewarm. Never imports cachemgr or backend."""

from engines.contract import Engine, EngineSpec, Geometry, LaneId, Logits
from engines.errors import BuildError, EngineError, ReleaseError, StepError

__all__ = [
    "BuildError", "Engine", "EngineError", "EngineSpec", "Geometry", "LaneId", "Logits", "ReleaseError", "StepError",
]
