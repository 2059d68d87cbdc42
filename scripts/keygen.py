"""`tensorcache keygen`: make the key pair that signs releases."""

import argparse

from scripts.arguments import Verbs, add_verb, path
from scripts.console import say
from scripts.refusals import engine_refusals

EXAMPLES = """
  tensorcache keygen keys/        # writes keys/release.key (0600) and keys/release.pub
"""


def add_parser(verbs: Verbs) -> None:
    """Add this verb to the command line."""
    parser = add_verb(
        verbs, "keygen", summary="make a signing key (EC P-256) and its public half", examples=EXAMPLES
    )
    parser.add_argument(
        "folder", type=path, help="where to write release.key and release.pub; never overwrites"
    )
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the pair."""
    from engines import generate_signing_key

    with engine_refusals():
        private, public = generate_signing_key(arguments.folder)
    say(f"private key  {private}  (keep it off the serving hosts)")
    say(f"public key   {public}  (name it under [trust] keys in tensorcache.toml)")
    return 0
