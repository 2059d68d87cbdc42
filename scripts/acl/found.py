"""What an acl file means, in words: limits, the state of keys, and what in it is of no use."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase

from backend.access import Acl, Allowance, KeyEntry, Principal

SOON: timedelta = timedelta(days=7)


def limits_text(allowance: Allowance) -> str:
    """`50 requests/s, 32 at once`."""
    parts = [
        f"{value:g} {unit}"
        for value, unit in (
            (allowance.requests_per_s, "requests/s"),
            (allowance.tokens_per_s, "tokens/s"),
            (allowance.concurrent, "at once"),
        )
        if value is not None
    ]
    return ", ".join(parts) or "none"


def key_state(key: KeyEntry, now: datetime) -> str:
    """Valid · expires in 3 d · expired."""
    if key.expires is None:
        return "valid"
    left = key.expires - now
    if left <= timedelta():
        return "expired"
    return f"expires in {left.days} d" if left.days else f"expires in {int(left.total_seconds() // 3600)} h"


def until_text(key: KeyEntry) -> str:
    """When it ends."""
    if key.expires is None:
        return "until it is taken out of the file"
    return f"until {key.expires.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def warnings(acl: Acl, models: Sequence[str], now: datetime) -> list[str]:
    """Everything in it that does nothing. `models`: those there are; none: nobody knows."""
    found = []
    for who in acl.principals.values():
        states = {key.id: key_state(key, now) for key in who.keys}
        found += [f"{who.name}: key {one} has expired: delete its table" for one in _of(states, "expired")]
        found += [
            f"{who.name}: key {key.id} {states[key.id]}: make the next one with `acl new-key`"
            for key in who.keys
            if key.expires is not None and timedelta() < key.expires - now <= SOON
        ]
        if len(_of(states, "expired")) == len(states):
            found.append(f"{who.name}: has no key that is valid, and cannot do anything")
        found += [f"{who.name}: {glob!r} matches no model there is" for glob in _idle(who, models)]
    return found


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line per row, however long: what is not cut and not wrapped can be searched."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _of(states: dict[str, str], state: str) -> list[str]:
    return [one for one, its in states.items() if its == state]


def _idle(who: Principal, models: Sequence[str]) -> list[str]:
    return [glob for glob in who.models if models and not any(fnmatchcase(model, glob) for model in models)]
