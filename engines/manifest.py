"""engine.json: what a release says about itself, read strictly.

A release is an immutable folder `<model>/<version>/releases/<digest>/` that holds engine.json, the graph (or
plan) with its weights, tokenizer.json and model.sig. `<digest>` is the SHA-256 of engine.json in hex:
engine.json names the SHA-256 of every other file, so that one digest fixes them all.
"""

import hashlib
import re
from typing import Annotated, Final, Literal

import msgspec

from engines.contract import Geometry
from engines.errors import ReleaseError

FORMAT: Final = "tensorcache-engine/1"
MANIFEST = "engine.json"
SIGNATURE = "model.sig"

MODEL_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
MODEL_NAME_RULE: Final = "1 … 128 letters, digits, '_', '.' or '-', and begin with none of the last two"

Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of a release."""

    sha256: Sha256
    size: Size


class Golden(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt whose greedy next token has a clear margin: a loaded engine must answer it."""

    prompt: tuple[int, ...]
    token: int
    margin: float


class ProfileInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shapes that one optimization profile of a plan takes, from one row of one token up.

    `activation_bytes`: device memory of one execution context with this profile.
    """

    rows: Count
    tokens: Count
    least_window: Count
    window: Count
    activation_bytes: Size


class TensorRTInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a TensorRT plan is bound to.

    `version` is that in the plan's header, "10.16.0.72". `profiles`: prefill, then decode. `built_for`: the
    very model of GPU, or every GPU of its compute capability. `weight_error`: root mean square, over the
    weights rounded to 4 bits, of ‖rounded − exact‖ / ‖exact‖; 0 where there are none.
    """

    version: Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,3}(\.[0-9]{1,3}){2,3}\Z")]
    compute_capability: Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,2}\.[0-9]\Z")]
    gpu_name: str
    profiles: tuple[ProfileInfo, ...]
    built_for: Literal["gpu", "capability"] = "gpu"
    weight_error: float = 0.0


class EngineManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of engine.json. `kv_identity` is 32 hex digits, computed by the builder.

    `tokenizer_digest` is the SHA-256 of tokenizer.json.
    """

    format: Literal["tensorcache-engine/1"]
    model: Annotated[str, msgspec.Meta(pattern=rf"^{MODEL_NAME.pattern}\Z")]
    release: Size
    runtime: Literal["onnxruntime", "tensorrt"]
    graph: str
    files: dict[str, FileEntry]
    geometry: Geometry
    precision: str
    kv_dtype: Literal["float32", "float16", "bfloat16"]
    kv_layout: Literal["linear"]
    block_tokens: Count
    lanes: Count
    max_seq_len: Count
    max_prefill_tokens: Count
    exact: bool
    kv_identity: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
    kernel_class: str
    weights_digest: str
    tokenizer_digest: Sha256
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    add_bos: bool
    chat_template: str | None
    golden: Golden
    tensorrt: TensorRTInfo | None = None


def parse_manifest(data: bytes) -> EngineManifest:
    """Decode engine.json; ReleaseError names the field that is wrong, missing or unknown."""
    try:
        return msgspec.json.decode(data, type=EngineManifest)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # invalid UTF-8 is a ValueError
        raise ReleaseError("manifest", expected=f"a valid {MANIFEST} ({FORMAT})", found=str(error)) from None


def encode_manifest(manifest: EngineManifest) -> bytes:
    """Encode deterministically (sorted keys, two-space indent): equal manifests have equal digests."""
    return msgspec.json.format(msgspec.json.encode(manifest, order="sorted"), indent=2) + b"\n"


def release_digest(manifest_bytes: bytes) -> str:
    """The name of a release: SHA-256 of its engine.json, in hex."""
    return hashlib.sha256(manifest_bytes).hexdigest()
