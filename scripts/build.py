"""`tensorcache build`: make a release folder (graph, weights, tokenizer, engine.json) from weights."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.arguments import Verbs, add_verb, path, positive
from scripts.console import progress_bar, say, show_table, size_text
from scripts.errors import UsageError
from scripts.refusals import engine_refusals
from scripts.scratch import put_in_place, scratch_for
from scripts.sources import load_decoder

if TYPE_CHECKING:
    from engines import EngineManifest

EXAMPLES = """
  tensorcache build demo --out build/engine/smollm2 --model smollm2
  tensorcache build llama.gguf --out build/engine/llama --model llama --precision int8 --lanes 16
  tensorcache build ./Qwen3-0.6B --out build/engine/qwen3 --model qwen3 --max-seq-len 8192 --release 2
  tensorcache build ./Qwen3-8B --target tensorrt --precision float16 --out build/qwen3-onnx
"""
_BLOCK_TOKENS = 32
_PREFILL_TOKENS = 512
TARGETS = ("onnxruntime", "tensorrt")


def add_parser(verbs: Verbs) -> None:
    """Add this verb to the command line."""
    parser = add_verb(verbs, "build", summary="build a release from a model's weights", examples=EXAMPLES)
    parser.add_argument(
        "source", help="a GGUF file, a Hugging Face folder, or `demo` (SmolLM2-135M-Instruct)"
    )
    parser.add_argument(
        "--out", type=path, required=True, help="release folder to write; an older one is replaced"
    )
    parser.add_argument(
        "--model", help="the name it is for and will be signed for (default: the name of --out)"
    )
    parser.add_argument("--release", type=positive, default=1, help="increasing number (default %(default)s)")
    parser.add_argument("--target", choices=TARGETS, default=TARGETS[0], help="runtime (default %(default)s)")
    parser.add_argument(
        "--precision", help="onnxruntime: int8 (default), int4, fp32; tensorrt: float16 (default) …"
    )
    parser.add_argument("--lanes", type=positive, default=8, help="sequences at a time (default %(default)s)")
    parser.add_argument(
        "--max-seq-len", type=positive, default=4096, help="tokens a sequence (default %(default)s)"
    )
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Build and say what it costs to serve; the tensorrt target ends at the graph for TensorRT's builder."""
    out: Path = arguments.out
    _refuse_foreign(out)
    with engine_refusals():
        if arguments.target == "tensorrt":
            return _build_tensorrt_graph(arguments)
        manifest = _build_release(arguments)
    _show(out, manifest)
    return 0


def _refuse_foreign(out: Path) -> None:
    """Only a folder that this verb wrote is ever replaced."""
    if out.exists() and not ((out / "engine.json").is_file() or (out / "graph.onnx").is_file()):
        raise UsageError(f"{out} exists and is no release: it will not be replaced")


def _build_release(arguments: argparse.Namespace) -> "EngineManifest":
    import msgspec

    from engines import EngineManifest, build_release
    from engines.build import BuildOptions

    out: Path = arguments.out
    options = BuildOptions(
        precision=arguments.precision or "int8",
        lanes=arguments.lanes,
        max_seq_len=arguments.max_seq_len,
        max_prefill_tokens=min(_PREFILL_TOKENS, arguments.max_seq_len),
    )
    with scratch_for(out, work="build") as scratch, progress_bar() as progress:
        task = progress.add_task("read weights", total=1.0)
        decoder = load_decoder(arguments.source, max_seq_len=arguments.max_seq_len)
        folder = build_release(
            decoder,
            scratch,
            model=arguments.model or out.name,
            release=arguments.release,
            options=options,
            progress=lambda stage, done: progress.update(task, description=stage, completed=done),
        )
        put_in_place(folder, out, scratch=scratch)
        progress.update(task, description=f"{out.name}: built", completed=1.0)
    return msgspec.json.decode((out / "engine.json").read_bytes(), type=EngineManifest)


def _show(out: Path, manifest: "EngineManifest") -> None:
    geometry = manifest.geometry
    per_token = geometry.layers * 2 * geometry.kv_heads * geometry.head_dim
    per_token *= 4 if manifest.kv_dtype == "float32" else 2
    lane = per_token * manifest.max_seq_len
    rows = [
        ("weights and graph", size_text(sum(entry.size for entry in manifest.files.values()))),
        ("KV of one lane", f"{size_text(lane)} ({manifest.max_seq_len} tokens)"),
        (f"KV of {manifest.lanes} lanes", size_text(lane * manifest.lanes)),
        ("KV of one cached token", size_text(per_token)),
        ("cached tokens in one GiB", f"{(1 << 30) // per_token}"),
    ]
    title = f"{manifest.model} release {manifest.release} ({manifest.runtime}, {manifest.precision})"
    show_table(title, ("what", "size"), rows)
    say(f"release      {out}")


def _build_tensorrt_graph(arguments: argparse.Namespace) -> int:
    """graph.onnx and its weights for TensorRT's own builder, which makes the plan where its GPU is."""
    from engines.graph_tensorrt import build_graph
    from engines.onnx_emit import WEIGHTS_FILE
    from engines.ort import cache_positions

    out: Path = arguments.out
    with scratch_for(out, work="build") as scratch, progress_bar() as progress:
        task = progress.add_task("read weights", total=2)
        decoder = load_decoder(arguments.source, max_seq_len=arguments.max_seq_len)
        positions = cache_positions(arguments.max_seq_len, _BLOCK_TOKENS)
        graph = build_graph(decoder, positions=positions, precision=arguments.precision or "float16")
        progress.update(task, description="write graph", completed=1)
        made = scratch / "graph"
        made.mkdir()
        (made / "graph.onnx").write_bytes(graph.model_bytes())
        with (made / WEIGHTS_FILE).open("wb") as file:
            size = graph.write_weights(file)
        put_in_place(made, out, scratch=scratch)
        progress.update(task, completed=2)
    say(f"graph        {out / 'graph.onnx'}: S = {positions}, weights {size_text(size)}")
    say("next         build the plan on its GPU with TensorRT 10.15 or later")
    return 0
