"""`tensorcache secret`: make, rotate, list and prune the secrets that name blocks and seal shards."""

import argparse
import shlex
import time
from pathlib import Path

from scripts.arguments import Verbs, add_verb, path
from scripts.console import say, show_table

EXAMPLES = """
  tensorcache secret new secrets/                  # naming.key and tag-1.key, files 0600
  tensorcache secret new secrets/ --group triton   # readable by that group, too: [secrets] secret_group
  tensorcache secret new secrets/ --rotate         # one more tag key; running servers take it up
  tensorcache secret list secrets/                 # which key seals, and until when the others are read
  tensorcache secret prune secrets/                # remove tag keys that nobody reads any more
"""
_GRACE_S = 86_400.0
_DAY_S = 86_400.0


def add_parser(verbs: Verbs) -> None:
    """Add this verb to the command line."""
    secret = add_verb(verbs, "secret", summary="make, rotate, list secrets of the cache", examples=EXAMPLES)
    actions = secret.add_subparsers(dest="action", required=True, metavar="ACTION")
    new = _add_action(actions, "new", "make what is missing")
    new.add_argument("--rotate", action="store_true", help="add a tag key with the next id")
    new.add_argument("--group", default="", metavar="NAME", help="let this group read the new files")
    new.set_defaults(handler=run)
    for name, summary, handler in (
        ("list", "show each tag key: no values", list_keys),
        ("prune", "remove tag keys past their grace time, never the newest", prune),
    ):
        action = _add_action(actions, name, summary)
        action.add_argument(
            "--grace-s", type=_grace, default=_GRACE_S, metavar="SECONDS",
            help="[secrets] grace_s of the nodes (default %(default).0f)",
        )  # fmt: skip
        action.set_defaults(handler=handler)


def run(arguments: argparse.Namespace) -> int:
    """Write what is missing; never replaces a secret."""
    from cachemgr import complete_secrets

    folder: Path = arguments.folder
    written = complete_secrets(folder, rotate=arguments.rotate, group=arguments.group)
    for secret in written:
        say(f"wrote        {secret}")
    if not written:
        say("wrote        nothing: the secrets are there (--rotate adds a tag key)")
    elif arguments.rotate and len(written) == 1:
        say("next         servers that use this folder seal with it within a second or two: no restart")
        say(f"             copy {written[0].name} to the folder of every other node; until a node has it, it")
        say("             misses what others sealed with it")
        say(f"             once [secrets] grace_s is over: tensorcache secret prune {_quoted(folder)}")
    else:
        say(f'next         name the folder in tensorcache.toml: [secrets] dir = "{folder}"')
        if arguments.group:
            say(f'             and the group: [secrets] secret_group = "{arguments.group}"')
        say("             nodes that share blocks need the same files: copy the folder, keep the modes")
    return 0


def list_keys(arguments: argparse.Namespace) -> int:
    """One row for each tag key; 1 if one cannot be used."""
    from cachemgr import TagKey, list_tag_keys

    now = time.time()

    def state(key: TagKey) -> str:
        if key.trouble:
            return "cannot be used"
        if key.sealing:
            return "seals"
        return f"read for {_span(key.expires - now)}" if key.expires > now else "expired"

    keys = list_tag_keys(arguments.folder, grace_s=arguments.grace_s)
    rows = [(str(key.key_id), "" if key.trouble else _span(now - key.appeared), state(key)) for key in keys]
    show_table(f"tag keys in {arguments.folder}", ("key id", "age", "state"), rows)
    troubles = [key.trouble for key in keys if key.trouble]
    for trouble in troubles:
        say(f"trouble      {trouble}")
    return 1 if troubles or not keys else 0


def prune(arguments: argparse.Namespace) -> int:
    """Remove what is expired."""
    from cachemgr import prune_tag_keys

    removed = prune_tag_keys(arguments.folder, grace_s=arguments.grace_s)
    for file in removed:
        say(f"removed      {file}")
    if not removed:
        say("removed      nothing: every tag key is sealed with or still read")
    return 0


def _add_action(actions: Verbs, name: str, summary: str) -> argparse.ArgumentParser:
    action: argparse.ArgumentParser = actions.add_parser(name, help=summary, description=summary)
    action.add_argument("folder", type=path, help="the folder that [secrets] dir names")
    return action


def _grace(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected seconds, got {text!r}") from None
    if not 0 <= number <= 31_536_000:
        raise argparse.ArgumentTypeError(f"expected 0 to 31536000 seconds, got {text}")
    return number


def _span(seconds: float) -> str:
    """`93784` → `1.1 days`."""
    for unit, length in (("days", _DAY_S), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{max(0.0, seconds):.0f} seconds"


def _quoted(folder: Path) -> str:
    return shlex.quote(str(folder))
