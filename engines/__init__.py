"""Decoders behind one Engine protocol: build, sign, verify, publish, load and open them.

A model's life, and the name in this face that starts each part of it:

    load_gguf, load_huggingface    weights and tokenizer from a file or folder
    build_release                  a release folder: graph, weights, tokenizer.json, engine.json
    sign_release                   a private key vouches for every byte of it
    publish_release                into a model's version folder as the current one, whole or not at all
    roll_back                      the release before it, or any other there, becomes current again
    list_releases, prune_releases  what lies in the version folder, and what is old there
    load_release                   verified bytes in memory
    open_engine                    a warm engine that answered its golden token
    compare_release, rehash_release  whether the folder still holds what was loaded from it

Its modules:

    contract, lanes             the Engine protocol, its spec and its lanes;  options, errors
    loading                     checks: signing, trust, release_folder, manifest, host_memory, plan_header
    opening, engine_spec        the chain's end: room, an engine, warm-up, golden token
    publishing, release_list    version_folder, history: what is current, was so, and lies there
    recheck                     a release in service against its folder
    ort                         the CPU engine; kv_pool, io_contract, kernel_class
    tensorrt_engine             the GPU engine; its doors: driver, trt, cuda, cuda_graphs
    ├ tensorrt_plan             a plan that was checked;  tensorrt_step one execution context and its inputs
    ├ device_parts              what an engine holds;  device_pool its lanes, and block copies;  device_memory
    ├ windows, step_graphs      few shapes, each warmed up and recorded once
    ├ device_logits             logits that stay on the device
    └ page_locking              pins a cache's memory
    build                       both targets: build_options, build_files, golden, new_file
    ├ build_onnxruntime         graph_onnxruntime, onnx_linears, quantise, smoothing, calibration
    └ build_tensorrt            graph_tensorrt, int4, tensorrt_network, plan_builder, layer_report
    decoder                     what loaders hand to builders: gguf, gguf_tokenizer, huggingface,
                                huggingface_text, safetensors_files; rope, onnx_emit

Security
- A release is executable content: whoever can make this process load one runs code in it. So nothing in it is
  parsed by a runtime before a trusted key's signature, and the digest of the very bytes, were checked;
  engines are opened only from a `VerifiedRelease`, never from a path. There is no switch to skip this, and
  without keys nothing loads.
- The signature protects against whoever can write to the model repository or load models into the server. It
  does not protect against whoever holds a private key, can write the node's trust settings, or runs as the
  same user: those are inside the boundary.
- An old release stays validly signed for ever. `TrustSettings.min_release` is what stops a roll-back to one
  that turned out to be bad; `current` alone cannot, as it is not signed.
- A signature says nothing about secrecy: weights and tokenizer lie readable on disk.

Importing this package is light: no ONNX, no runtime, no builder, no GPU library; each is imported by the call
that needs it. Never imports cachemgr or backend.
"""

import importlib
from typing import TYPE_CHECKING, Any

from engines.contract import Engine, EngineSpec, Geometry, LaneId, Logits, shares_kv
from engines.device_memory import DeviceMemoryUse, device_memory_use
from engines.errors import BuildError, DeviceError, DeviceLostError, EngineError, ReleaseError, StepError
from engines.host_memory import give_back_freed_memory
from engines.lanes import LanePool
from engines.loading import (
    ReleaseFacts,
    VerifiedRelease,
    current_digest,
    inspect_release,
    load_release,
    load_release_dir,
)
from engines.manifest import EngineManifest
from engines.opening import Runner, at_once, open_engine
from engines.options import EngineOptions
from engines.page_locking import NoPageLocker, PageLocker, open_page_locker
from engines.publishing import Switch, publish_release, roll_back
from engines.recheck import Difference, Pace, Rehash, compare_release, rehash_release
from engines.release_list import ListedRelease, earlier_releases, list_releases, prune_releases
from engines.signing import generate_signing_key, key_fingerprints, sign_release
from engines.trust import TrustSettings

if TYPE_CHECKING:
    from engines.build import BuildOptions, build_release
    from engines.gguf import demo_gguf, load_gguf
    from engines.huggingface import load_huggingface

__all__ = [
    "BuildError",
    "BuildOptions",
    "DeviceError",
    "DeviceLostError",
    "DeviceMemoryUse",
    "Difference",
    "Engine",
    "EngineError",
    "EngineManifest",
    "EngineOptions",
    "EngineSpec",
    "Geometry",
    "LaneId",
    "LanePool",
    "ListedRelease",
    "Logits",
    "NoPageLocker",
    "Pace",
    "PageLocker",
    "Rehash",
    "ReleaseError",
    "ReleaseFacts",
    "Runner",
    "StepError",
    "Switch",
    "TrustSettings",
    "VerifiedRelease",
    "at_once",
    "build_release",
    "compare_release",
    "current_digest",
    "demo_gguf",
    "device_memory_use",
    "earlier_releases",
    "generate_signing_key",
    "give_back_freed_memory",
    "inspect_release",
    "key_fingerprints",
    "list_releases",
    "load_gguf",
    "load_huggingface",
    "load_release",
    "load_release_dir",
    "open_engine",
    "open_page_locker",
    "prune_releases",
    "publish_release",
    "rehash_release",
    "roll_back",
    "shares_kv",
    "sign_release",
]

_BUILDERS = {
    "BuildOptions": "engines.build",
    "build_release": "engines.build",
    "demo_gguf": "engines.gguf",
    "load_gguf": "engines.gguf",
    "load_huggingface": "engines.huggingface",
}


def __getattr__(name: str) -> Any:
    """Builders need libraries that serving hosts do not install: they are imported on first use."""
    if name not in _BUILDERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_BUILDERS[name]), name)
