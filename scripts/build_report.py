"""What a built release costs to serve: memory known before it is taken, and how its attentions run."""

from pathlib import Path
from typing import TYPE_CHECKING

from scripts.console import say, show_table, size_text

if TYPE_CHECKING:
    from engines import EngineManifest
    from engines.layer_report import LayerReport, ProfileLayers
    from engines.manifest import TensorRTInfo

Rows = list[tuple[str, str]]


def show_built(out: Path) -> None:
    """Tables for the release folder `out`, and where it lies. ReleaseError, BuildError if it is none."""
    from engines.layer_report import REPORT_FILE, read_report
    from engines.manifest import MANIFEST, parse_manifest

    manifest = parse_manifest((out / MANIFEST).read_bytes())
    title = f"{manifest.model} release {manifest.release} ({manifest.runtime}, {manifest.precision})"
    show_table(title, ("what", "size"), [*_kv_rows(manifest), *_plan_rows(manifest)])
    if REPORT_FILE in manifest.files:
        _show_layers(read_report((out / REPORT_FILE).read_bytes()))
    say(f"release      {out}")


def _kv_rows(manifest: "EngineManifest") -> Rows:
    lane, token = lane_bytes(manifest), token_bytes(manifest)
    files = sum(entry.size for entry in manifest.files.values())
    return [
        ("weights and graph", size_text(files)),
        ("KV of one lane", f"{size_text(lane)} ({manifest.max_seq_len} tokens)"),
        (f"KV of {manifest.lanes} lanes", size_text(lane * manifest.lanes)),
        ("KV of one cached token", size_text(token)),
        ("cached tokens in one GiB", f"{(1 << 30) // token}"),
    ]


def token_bytes(manifest: "EngineManifest") -> int:
    """KV of one position, in a lane or in a block."""
    geometry = manifest.geometry
    itemsize = 4 if manifest.kv_dtype == "float32" else 2
    return geometry.layers * 2 * geometry.kv_heads * geometry.head_dim * itemsize


def lane_bytes(manifest: "EngineManifest") -> int:
    """KV of one lane, its scratch positions included."""
    from engines.engine_spec import cache_positions

    return token_bytes(manifest) * cache_positions(manifest.max_seq_len, manifest.block_tokens)


def _plan_rows(manifest: "EngineManifest") -> Rows:
    plan = manifest.tensorrt
    if plan is None:
        return []
    prefill, decode = (profile.activation_bytes for profile in plan.profiles)
    served = (
        manifest.files[manifest.graph].size + max(prefill, decode) + lane_bytes(manifest) * manifest.lanes
    )
    rows = [
        (f"activations of a prefill of {plan.profiles[0].tokens}", size_text(prefill)),
        (f"activations of a decode of {plan.profiles[1].rows}", size_text(decode)),
        ("GPU memory to serve it, at least", size_text(served)),  # the two never run at once and share
        ("built for", _place(plan)),
        ("TensorRT", plan.version),
    ]
    if manifest.precision == "int4":
        rows.append(("error of weights in 4 bits", f"{plan.weight_error:.2%}"))
    return rows


def _place(plan: "TensorRTInfo") -> str:
    return plan.gpu_name if plan.built_for == "gpu" else f"compute capability {plan.compute_capability}"


def _show_layers(report: "LayerReport") -> None:
    columns = ("profile", "attentions fused", "unfused", "layers", "activations")
    show_table("layers", columns, [_layer_row(profile) for profile in report.profiles])
    for profile in report.profiles:
        if profile.unfused:
            say(f"unfused in {profile.profile}: {', '.join(profile.unfused)}")


def _layer_row(profile: "ProfileLayers") -> tuple[str, ...]:
    counts = (len(profile.fused), len(profile.unfused), len(profile.layers))
    return (profile.profile, *map(str, counts), size_text(profile.activation_bytes))
