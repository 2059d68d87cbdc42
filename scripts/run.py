"""`tensorcache run`: the demo, then examples to paste, then serving until Ctrl-C."""

import argparse
import contextlib

from scripts.arguments import Verbs, add_verb
from scripts.console import complain, say
from scripts.demo import ask_twice, decoder_of, show_examples
from scripts.errors import RejectedError
from scripts.serve import keep_serving
from scripts.serving import add_serving, supervised

EXAMPLES = """
  tensorcache run
  tensorcache run --http-port 9000 --grpc-port 9001 --metrics-port 9002
"""


def add_parser(verbs: Verbs) -> None:
    """Add this verb to the command line."""
    parser = add_verb(
        verbs, "run", summary="show what it does, then keep serving until Ctrl-C", examples=EXAMPLES
    )
    add_serving(parser)
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Exit code 0 on Ctrl-C. A demo that did not hold is said, and the server keeps serving."""
    with contextlib.suppress(KeyboardInterrupt), supervised(arguments) as serving:
        try:
            ask_twice(serving)
        except RejectedError as error:
            complain(str(error))
        show_examples(serving.address, decoder_of(serving.models))
        keep_serving(serving)
    say("stopped")
    return 0
