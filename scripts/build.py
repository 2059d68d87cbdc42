"""`tensorcache build`: make a release folder (graph or plan, tokenizer, engine.json) from weights."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, cast

from scripts.arguments import Verbs, add_verb, path, positive
from scripts.build_report import show_built
from scripts.console import progress_bar
from scripts.errors import UsageError
from scripts.refusals import engine_refusals
from scripts.scratch import put_in_place, scratch_for
from scripts.sources import load_decoder

if TYPE_CHECKING:
    from engines import BuildOptions
    from engines.build_options import Precision

EXAMPLES = """
  tensorcache build demo --out build/engine/smollm2 --model smollm2
  tensorcache build llama.gguf --out build/engine/llama --model llama --precision int8 --lanes 16
  tensorcache build ./Qwen3-0.6B --out build/engine/qwen3 --model qwen3 --max-seq-len 8192 --release 2
  tensorcache build ./Qwen3-8B --out build/engine/qwen3 --target tensorrt --precision bfloat16 --lanes 32
"""
TARGETS = {"onnxruntime": "int8", "tensorrt": "float16"}  # → its default precision
_GIB = 1 << 30


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
    parser.add_argument(
        "--target", choices=tuple(TARGETS), default="onnxruntime", help="runtime (default %(default)s)"
    )
    parser.add_argument(
        "--precision",
        help="onnxruntime: int8 (default), int4, fp32; tensorrt: float16 (default), bfloat16, int4",
    )
    parser.add_argument("--lanes", type=positive, default=8, help="sequences at a time (default %(default)s)")
    parser.add_argument(
        "--max-seq-len", type=positive, default=4096, help="tokens a sequence (default %(default)s)"
    )
    parser.add_argument(
        "--max-prefill-tokens",
        type=positive,
        default=512,
        help="longest part of a prompt computed at once; its activations take memory (default %(default)s)",
    )
    _add_plan_options(parser)
    parser.set_defaults(handler=run)


def _add_plan_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("tensorrt only: built on the GPU that will serve")
    group.add_argument("--device", type=int, default=0, help="number of the GPU (default %(default)s)")
    group.add_argument(
        "--plan-for",
        choices=("gpu", "capability"),
        default="gpu",
        help="this very model of GPU (default), or every one of its compute capability, perhaps slower",
    )
    group.add_argument(
        "--workspace", type=positive, metavar="GIB", help="bound of one kernel's scratch memory"
    )
    group.add_argument(
        "--timing-cache",
        type=path,
        metavar="FOLDER",
        help="where measured kernel times are kept (default: .timing beside --out)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Build, and say what it costs to serve."""
    out: Path = arguments.out
    if out.exists() and not (out / "engine.json").is_file():
        raise UsageError(f"{out} exists and is no release: it will not be replaced")
    with engine_refusals():
        _build(arguments, out)
        show_built(out)
    return 0


def _build(arguments: argparse.Namespace, out: Path) -> None:
    from engines.build import build_release, require_target

    options = _options(arguments, out)
    require_target(options)  # before gigabytes are read for nothing
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


def _options(arguments: argparse.Namespace, out: Path) -> "BuildOptions":
    from engines.build import BuildOptions, PlanOptions

    return BuildOptions(
        target=arguments.target,
        precision=cast(
            "Precision", arguments.precision or TARGETS[arguments.target]
        ),  # checked by the builder
        lanes=arguments.lanes,
        max_seq_len=arguments.max_seq_len,
        max_prefill_tokens=min(arguments.max_prefill_tokens, arguments.max_seq_len),
        plan=PlanOptions(
            device=arguments.device,
            workspace_bytes=(arguments.workspace or 0) * _GIB,
            timing_cache=arguments.timing_cache or out.parent / ".timing",
            built_for=arguments.plan_for,
        ),
    )
