"""`tensorcache sign`: sign a release folder."""

import argparse

from scripts.arguments import Verbs, add_verb, path
from scripts.console import say
from scripts.refusals import engine_refusals

EXAMPLES = """
  tensorcache sign build/engine/smollm2 --key keys/release.key
"""


def add_parser(verbs: Verbs) -> None:
    """Add this verb to the command line."""
    parser = add_verb(
        verbs, "sign", summary="sign a release folder (writes its model.sig)", examples=EXAMPLES
    )
    parser.add_argument("release", type=path, help="folder with engine.json, the graph and tokenizer.json")
    parser.add_argument("--key", type=path, required=True, help="private key of `tensorcache keygen`")
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Sign; refuses files that engine.json does not describe."""
    from engines import sign_release

    with engine_refusals():
        signature = sign_release(arguments.release, arguments.key)
    say(f"signed       {signature}")
    return 0
