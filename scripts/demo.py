"""`tensorcache demo`: the same long prompt twice through Triton; the second answer is equal and faster."""

import argparse
import contextlib
import secrets

from scripts.arguments import Verbs, add_verb
from scripts.client_examples import client_examples
from scripts.console import console, say, seconds_text, show_table
from scripts.demo_prompt import QUESTION, demo_messages
from scripts.errors import RejectedError, UsageError
from scripts.serving import Serving, add_serving, supervised
from scripts.streamed_answer import StreamedAnswer
from scripts.triton_runtime import TritonAddress

EXAMPLES = """
  tensorcache demo --home build/run
  tensorcache demo --http-port 9000 --grpc-port 9001 --metrics-port 9002
"""
MAX_TOKENS = 48


def add_parser(verbs: Verbs) -> None:
    """Add this verb to the command line."""
    parser = add_verb(
        verbs,
        "demo",
        summary="start Triton, ask twice, compare, stop; exit code 1 if it did not hold",
        examples=EXAMPLES,
    )
    add_serving(parser)
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Exit code 0 only if the second answer equals the first and came faster."""
    with contextlib.suppress(KeyboardInterrupt), supervised(arguments) as serving:
        ask_twice(serving)
        return 0
    return 130


def ask_twice(serving: Serving) -> None:
    """Show both answers and their times; RejectedError if the promise did not hold."""
    from scripts.triton_stream import stream_answer  # late: other verbs should not wait for tritonclient

    model = decoder_of(serving.models)
    url = f"{serving.address.client_host}:{serving.address.grpc_port}"
    # The arena outlives the server. A salt of its own keeps an earlier demo from warming up the first answer.
    request: dict[str, object] = {
        "messages": demo_messages(),
        "max_tokens": MAX_TOKENS,
        "stream": True,
        "cache_salt": secrets.token_hex(8),
    }
    answers: list[StreamedAnswer] = []
    for ordinal in ("first", "second"):
        say(f"\n[{ordinal} time] a long handbook, then: {QUESTION}")
        answers.append(stream_answer(url, model, request, on_text=_show))
        console.print()
    rows = [
        (
            ordinal,
            str(answer.input_tokens),
            str(answer.cached_tokens),
            seconds_text(answer.ttft_s),
            seconds_text(answer.seconds),
        )
        for ordinal, answer in zip(("first", "second"), answers, strict=True)
    ]
    say("")
    show_table(
        "the same prompt, twice",
        ("request", "prompt tokens", "cached tokens", "time to first token", "total"),
        rows,
    )
    judge(*answers)


def judge(first: StreamedAnswer, second: StreamedAnswer) -> None:
    """RejectedError unless `second` has the text of `first`, used the cache, and began sooner."""
    if not first.text:
        raise RejectedError("the first answer is empty")
    if second.text != first.text:
        raise RejectedError(f"the answers differ: {first.text!r} and then {second.text!r}")
    if not second.cached_tokens > first.cached_tokens:
        raise RejectedError(
            f"the second answer used {second.cached_tokens} cached tokens, the first {first.cached_tokens}"
        )
    if not second.ttft_s < first.ttft_s:
        raise RejectedError(
            f"the second was not faster: {seconds_text(first.ttft_s)}, then {seconds_text(second.ttft_s)}"
        )
    say(f"same text, first token {first.ttft_s / second.ttft_s:.1f} × sooner")


def _show(piece: str) -> None:
    console.print(piece, end="", markup=False, style="cyan")


def decoder_of(models: tuple[str, ...]) -> str:
    """The first model that streams: not a facade."""
    for model in models:
        if not model.endswith("_sync"):
            return model
    raise UsageError(f"no decoder among the models {', '.join(models)}")


def show_examples(address: TritonAddress, model: str) -> None:
    """What to paste into another terminal."""
    say(client_examples(address, model))
