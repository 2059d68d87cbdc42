"""`tensorcache secret`: make the secrets that name blocks and seal shards."""

import argparse
import os
import re
import secrets
from pathlib import Path

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
    written = make_secrets(arguments.folder, rotate=arguments.rotate)
    for secret in written:
        say(f"wrote        {secret}")
    if not written:
        say("wrote        nothing: the secrets are there (--rotate adds a tag key)")
    return 0


def make_secrets(folder: Path, *, rotate: bool = False) -> list[Path]:
    """naming.key and tag-<id>.key, 32 random bytes in hex each, mode 0600; the paths that are new."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    ids = [
        int(found[1]) for path in folder.iterdir() if (found := re.fullmatch(r"tag-(\d+)\.key", path.name))
    ]
    wanted = [] if (folder / "naming.key").exists() else [folder / "naming.key"]
    if rotate or not ids:
        wanted.append(folder / f"tag-{max(ids, default=0) + 1}.key")
    for secret in wanted:
        handle = os.open(secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
    return wanted
