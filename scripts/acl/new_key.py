"""`tensorcache acl new-key`: a credential for a principal, shown once; the file keeps its digest."""

import argparse
import re
import sys
from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from scripts.acl.where import add_place, place_from
from scripts.arguments import Verbs, add_verb
from scripts.console import errors
from scripts.errors import UsageError

if TYPE_CHECKING:
    from backend.access import Acl

EXAMPLES = """
  tensorcache acl new-key search --models smollm2                 # a new principal, with its first key
  KEY=$(tensorcache acl new-key search --expires 90d)             # one more, for rotation
  (umask 077; tensorcache acl new-key search > search.key)        # for --key-file
  tensorcache acl new-key ops --models '*' --verbs infer admin --expires 2027-01-01
  tensorcache acl new-key search --show-only                      # for a file that is kept elsewhere

The credential is the one line on standard output and is kept nowhere. A server that obeys the file takes the
key up within a second. To rotate, hand the new key out, then delete the table of the old one.
"""

_MAX_DAYS = 36_500
_MAX_ID = 63


def add_new_key(parts: Verbs) -> None:
    """Add this part to the command line."""
    parser = add_verb(parts, "new-key", summary="a new credential, shown once", examples=EXAMPLES)
    parser.add_argument("principal", help="whose it is; one that is not there yet is made, with --models")
    parser.add_argument(
        "--id", metavar="ID", help="of the key, no secret (default: the principal and a number)"
    )
    parser.add_argument(
        "--expires",
        type=_expires,
        metavar="WHEN",
        help="90d, 2027-01-01 or a time with offset (default: never)",
    )
    parser.add_argument("--models", nargs="+", metavar="GLOB", help="what a new principal may use")
    parser.add_argument("--namespace", metavar="N", help="of a new principal (default: its name)")
    parser.add_argument(
        "--verbs", nargs="+", metavar="VERB", help="infer, cache.read, cache.write (the default), admin"
    )
    parser.add_argument("--show-only", action="store_true", help="print what to paste, and write nothing")
    add_place(parser)
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the credential, after the file has its digest."""
    from backend.access import KeyEntry, new_key
    from scripts.acl.acl_edit import acl_at, append_to_acl
    from scripts.acl.acl_text import NewPrincipal, key_text, principal_text

    name: str = arguments.principal
    place = place_from(arguments)
    made: list[tuple[str, KeyEntry]] = []

    def addition(acl: "Acl") -> str:
        new = name not in acl.principals
        _check(arguments, new=new)
        key_id = arguments.id or _free_id(
            name, {key.id for who in acl.principals.values() for key in who.keys}
        )
        made[:] = [new_key(key_id, expires=arguments.expires)]
        table = NewPrincipal(arguments.models or (), arguments.namespace, arguments.verbs)
        return (f"{principal_text(name, table)}\n" if new else "") + key_text(name, made[0][1])

    if arguments.show_only:
        _explain(f"append to {place.acl}:\n\n{addition(acl_at(place.acl))}")
    else:
        new_file = not place.acl.exists()
        append_to_acl(place.acl, addition)
        if new_file:
            _explain(f"{place.acl}: is new: a server whose acl file it is obeys it within a second")
        until = f", until {arguments.expires:%Y-%m-%d %H:%M} UTC" if arguments.expires else ""
        _explain(f"{place.acl}: {name} has a new key, {made[0][1].id}{until}; this is its only appearance:")
    sys.stdout.write(f"{made[0][0]}\n")
    sys.stdout.flush()
    return 0


def _check(arguments: argparse.Namespace, *, new: bool) -> None:
    if new and not arguments.models:
        raise UsageError(
            f"--models: {arguments.principal} is new: say which models it may use, as '*' or names"
        )
    given = [option for option in ("models", "namespace", "verbs") if getattr(arguments, option) is not None]
    if not new and given:
        raise UsageError(f"--{given[0]}: {arguments.principal} is there already: edit the file to change it")


def _free_id(name: str, taken: Collection[str]) -> str:
    """One that no key had, as far as the file tells: an old id in a log must not be mistaken for this one."""
    stem = re.sub("[^a-z0-9]+", "-", name.lower())[: _MAX_ID - 6].strip("-") or "key"
    numbers = [int(found[1]) for one in taken if (found := re.fullmatch(rf"{stem}-([0-9]{{1,5}})", one))]
    number = max(numbers, default=0) + 1
    while f"{stem}-{number}" in taken:
        number += 1
    return f"{stem}-{number}"


def _explain(text: str) -> None:
    errors.print(text.encode(errors.encoding, "backslashreplace").decode(errors.encoding), markup=False)


def _expires(text: str) -> datetime:
    now = datetime.now(UTC)
    if days := re.fullmatch(r"([0-9]{1,5})d", text):
        if not 1 <= int(days[1]) <= _MAX_DAYS:
            raise argparse.ArgumentTypeError(f"expected 1d to {_MAX_DAYS}d, got {text!r}")
        return (now + timedelta(days=int(days[1]))).replace(microsecond=0)
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected 90d, 2027-01-01 or 2027-01-01T12:00:00Z, got {text!r}"
        ) from None
    if when.tzinfo is None:
        if len(text) > len("2027-01-01"):
            raise argparse.ArgumentTypeError(f"expected a time with an offset, such as {text}Z, got {text!r}")
        when = when.replace(tzinfo=UTC)
    when = when.astimezone(UTC).replace(microsecond=0)
    if when <= now:
        raise argparse.ArgumentTypeError(f"expected a time to come, got {text!r}")
    return when
