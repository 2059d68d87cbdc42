"""`tensorcache secret`: make the secrets that name blocks and seal shards."""

import argparse

from scripts.arguments import Verbs, add_verb, path
from scripts.console import say

EXAMPLES = """
  tensorcache secret new secrets/             # naming.key and tag-1.key, files 0600
  tensorcache secret new secrets/ --rotate    # one more tag key; the old ones stay readable
"""


def add_parser(verbs: Verbs) -> None:
    """Add this verb to the command line."""
    parser = add_verb(verbs, "secret", summary="make the secrets of the cache", examples=EXAMPLES)
    parser.add_argument("action", choices=("new",), help="new: make what is missing")
    parser.add_argument("folder", type=path, help="the folder that [secrets] dir names")
    parser.add_argument("--rotate", action="store_true", help="add a tag key with the next id")
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Write what is missing; never replaces a secret."""
    from cachemgr import complete_secrets

    written = complete_secrets(arguments.folder, rotate=arguments.rotate)
    for secret in written:
        say(f"wrote        {secret}")
    if not written:
        say("wrote        nothing: the secrets are there (--rotate adds a tag key)")
    return 0
