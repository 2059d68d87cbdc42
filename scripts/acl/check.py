"""`tensorcache acl check` and `acl list`: what an acl file says, and whom a credential is of."""

import argparse
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from scripts.acl.where import add_key_file, add_place, credential_in, place_from
from scripts.arguments import Verbs, add_verb
from scripts.console import complain, say
from scripts.errors import RejectedError

if TYPE_CHECKING:
    from backend.access import Acl

CHECK_EXAMPLES = """
  tensorcache acl check                                  # exit code 1, and why, if no server would take it
  tensorcache acl check --acl acl.toml --model smollm2   # who may use this model
  tensorcache acl check --key-file search.key            # whose it is, what they may do, until when
  echo "$KEY" | tensorcache acl check --model smollm2 --key-file -
"""
LIST_EXAMPLES = """
  tensorcache acl list
  tensorcache acl list --acl acl.toml
"""


def add_check(parts: Verbs) -> None:
    """Add both parts to the command line."""
    check = add_verb(parts, "check", summary="is the file right, and whose is a key", examples=CHECK_EXAMPLES)
    add_place(check)
    check.add_argument("--model", metavar="M", help="may it be used, and by whom")
    add_key_file(check)
    check.set_defaults(handler=run_check)
    listed = add_verb(parts, "list", summary="principals and their keys", examples=LIST_EXAMPLES)
    add_place(listed)
    listed.set_defaults(handler=run_list)


def run_check(arguments: argparse.Namespace) -> int:
    """Exit code 1 for a file that is refused, a credential that is, or a model that it is not for."""
    from backend.access import read_acl
    from scripts.acl.found import warnings

    place, now = place_from(arguments), datetime.now(UTC)
    acl = read_acl(place.acl)
    keys = sum(len(who.keys) for who in acl.principals.values())
    say(f"right        {place.acl}: {_count(len(acl.principals), 'principal')}, {_count(keys, 'key')}")
    for warning in warnings(acl, place.models, now):
        complain(warning)
    if arguments.key_file is not None:
        return _say_whose(acl, credential_in(arguments.key_file), arguments.model, now)
    if arguments.model is not None:
        users = [name for name, who in acl.principals.items() if who.may_use(arguments.model)]
        if not users:
            raise RejectedError(f"no principal may use the model {arguments.model}")
        say(f"{arguments.model}: {', '.join(users)}")
    return 0


def run_list(arguments: argparse.Namespace) -> int:
    """One row per key."""
    from backend.access import read_acl
    from scripts.acl.found import aligned, key_state, limits_text, warnings

    place, now = place_from(arguments), datetime.now(UTC)
    acl = read_acl(place.acl)
    rows: list[tuple[str, ...]] = []
    for who in acl.principals.values():
        keys = [f"{key.id}: {key_state(key, now)}" for key in who.keys] or ["no key"]
        verbs = ", ".join(sorted(who.verbs))
        about = (who.name, who.namespace, ", ".join(who.models), verbs, limits_text(who.allowance))
        rows += [(*(about if not number else [""] * len(about)), key) for number, key in enumerate(keys)]
    for line in aligned([("principal", "namespace", "models", "verbs", "limits", "key"), *rows]):
        say(line)
    for warning in warnings(acl, place.models, now):
        complain(warning)
    return 0


def _say_whose(acl: "Acl", credential: str, model: str | None, now: datetime) -> int:
    from backend.errors import AccessDenied
    from scripts.acl.found import limits_text, until_text

    try:
        caller = acl.find(credential, now=now.timestamp())
    except AccessDenied as denied:
        whose = f" (key {denied.key_id} of {denied.principal})" if denied.key_id else ""
        raise RejectedError(
            f"this credential would be refused: {denied.why.replace('_', ' ')}{whose}"
        ) from None
    who = acl.principals[caller.principal]
    key = next(key for key in who.keys if key.id == caller.key_id)
    say(f"principal    {who.name}, by the key {key.id}, {until_text(key)}")
    say(f"namespace    {who.namespace}")
    say(f"verbs        {', '.join(sorted(who.verbs))}")
    say(f"models       {', '.join(who.models)}")
    say(f"limits       {limits_text(who.allowance)}")
    if model is not None and not who.may_use(model):
        raise RejectedError(f"{who.name} may not use the model {model}")
    return 0


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
