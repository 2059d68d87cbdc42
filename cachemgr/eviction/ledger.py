"""How much of the slots each namespace holds and may hold, and who gives one when there is no room.

Number 0 is all that nobody is named for: other namespaces, public blocks, what was found or received.

A quota is kept even while slots are free: a namespace that has reached it gives one of its own. Otherwise
that one gives which holds most for what is due to it: its minimum share, and at least an equal part of what
all minimum shares leave; number 0 is due all of that. None gives to another what its minimum share covers.

Threads: no lock inside; the cache's one lock guards every call.
"""

from collections.abc import Mapping
from typing import Final

from cachemgr.contract import NamespaceShare

MOST_NAMED: Final = 64
"""So many namespaces may have a share of their own."""

_ROUNDING: Final = 1e-9
_NEXT_TO_NOTHING: Final = 1e-9
"""Part of the slots that is due to whom nothing is left; of several such, who holds most gives."""


class Ledger:
    """Counts by number, and the limits that follow from shares and slots."""

    def __init__(self) -> None:
        self.held = [0] * (MOST_NAMED + 1)
        """Slots of each number but 0, those being written included."""
        self._slots = 0
        self._shares: dict[int, NamespaceShare] = {}
        self._quotas = [0] * (MOST_NAMED + 1)
        self._floors = [0] * (MOST_NAMED + 1)
        self._due = [1.0] * (MOST_NAMED + 1)

    def add_slots(self, count: int) -> None:
        """There are more slots to share."""
        self._slots += count
        self._limit()

    def name(self, shares: Mapping[int, NamespaceShare]) -> None:
        """From now on these numbers have shares, and no others."""
        self._shares = dict(shares)
        self._limit()

    def unname(self, number: int) -> None:
        """What a number has, until it holds nothing any more, counts to number 0."""
        del self._shares[number]
        self._limit()

    def at_quota(self, number: int) -> bool:
        """True if a number other than 0 gets one more slot only for one of its own."""
        return self.excess(number) >= 0

    def beyond_quota(self) -> list[int]:
        """Who holds more than a quota that is lower than it was."""
        return [number for number in self._shares if self.excess(number) > 0]

    def excess(self, number: int) -> int:
        """How many more slots a number other than 0 holds than its quota allows."""
        return self.held[number] - self._quotas[number]

    def unnamed(self) -> int:
        """Slots of number 0, where none is free."""
        return max(0, self._slots - sum(self.held[number] for number in self._shares))

    def givers(self, number: int) -> list[int]:
        """Who may give a slot to `number`, in that order."""
        if number and self.at_quota(number):
            return [number]
        held, due = self.held, self._due
        ranked = [
            (held[other] / due[other], other == number, other)
            for other in self._shares
            if held[other] > self._floors[other] or other == number
        ]
        ranked.append((self.unnamed() / due[0], not number, 0))
        ranked.sort(reverse=True)
        return [other for _, _, other in ranked]

    def _limit(self) -> None:
        floors = {number: min(share.min_share, share.quota) for number, share in self._shares.items()}
        left = max(0.0, 1.0 - sum(floors.values()))
        self._due[0] = max(left, _NEXT_TO_NOTHING)
        for number, share in self._shares.items():
            self._quotas[number] = int(share.quota * self._slots + _ROUNDING)
            self._floors[number] = int(floors[number] * self._slots + _ROUNDING)
            self._due[number] = max(floors[number], left / (len(floors) + 1), _NEXT_TO_NOTHING)


def check_shares(shares: Mapping[str, NamespaceShare]) -> None:
    """ValueError for what cannot be kept."""
    if len(shares) > MOST_NAMED:
        raise ValueError(f"shares: at most {MOST_NAMED} namespaces can have one, got {len(shares)}")
    for namespace, share in shares.items():
        if not namespace:
            raise ValueError("shares: a namespace that has one must have a name")
        for field, value in (("quota", share.quota), ("min_share", share.min_share)):
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"shares: {field} of {namespace!r} must be in [0, 1], got {value}")
    promised = sum(share.min_share for share in shares.values())
    if promised > 1.0 + _ROUNDING:
        raise ValueError(f"shares: all min_share together must be at most 1, got {promised:.3f}")
