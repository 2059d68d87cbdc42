"""`tensorcache bench`: measure this machine's numbers; everything after the verb goes to the bench itself."""

import argparse

from scripts.arguments import Verbs


def add_parser(verbs: Verbs) -> None:
    """Add this verb; its own --help is the bench's."""
    parser = verbs.add_parser("bench", help="measure against the goals and against peers", add_help=False)
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Hand over."""
    from scripts import bench

    return bench.main(arguments.rest)
