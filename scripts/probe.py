"""`tensorcache probe`: the liveness check that Triton's own health is not: does a model give a token."""

import argparse

from scripts.arguments import Verbs, add_verb, port, seconds
from scripts.console import say, seconds_text
from scripts.triton_http import TritonHttp
from scripts.triton_runtime import TritonAddress

EXAMPLES = """
  tensorcache probe                                   # exit code 0 = alive, 1 = not
  tensorcache probe --model smollm2 --http-port 9000 --limit 5
"""


def add_parser(verbs: Verbs) -> None:
    """Add this verb to the command line."""
    parser = add_verb(
        verbs, "probe", summary="ask for one token; exit code 0 if it comes in time", examples=EXAMPLES
    )
    parser.add_argument("--model", default="smollm2", help="model to ask (default %(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="where Triton listens (default %(default)s)")
    parser.add_argument("--http-port", type=port, default=8000, metavar="PORT", help="default %(default)s")
    parser.add_argument("--limit", type=seconds, default=2.0, metavar="SECONDS", help="default %(default)s")
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """One line and an exit code. A model that answers "no room" is alive."""
    address = TritonAddress(host=arguments.host, http_port=arguments.http_port)
    result = TritonHttp(address).probe(arguments.model, limit_s=arguments.limit)
    verdict = "busy" if result.busy else "ok" if result.alive else "failed"
    say(f"{verdict} {arguments.model} {seconds_text(result.seconds)}: {result.detail}")
    return 0 if result.alive else 1
