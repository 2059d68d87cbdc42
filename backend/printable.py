"""Text that came from a client, fit for a line of a log: it must not forge one."""

from typing import Final

MAX_SHOWN: Final = 128


def printable(text: str) -> str:
    """As it is if that is harmless and short, else quoted and cut; "-" for nothing."""
    if text.isprintable() and len(text) <= MAX_SHOWN:
        return text or "-"
    return repr(text[:MAX_SHOWN])
