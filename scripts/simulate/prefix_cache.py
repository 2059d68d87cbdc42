"""A cache of prefixes under a policy that knows single blocks only.

The hit is counted first, and then every block of the request is touched, back to front, whether it was here
or not: so a list by recency has the front of a chain as its most recent part, and loses the tail first.
"""

from collections.abc import Sequence

from scripts.simulate.contract import Policy


class PrefixCache:
    """What `policy` would have kept."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def request(self, chain: Sequence[int]) -> int:
        """See Cache."""
        policy = self._policy
        hit = 0
        for block in chain:
            if block not in policy:
                break
            hit += 1
        touch = policy.touch
        for block in reversed(chain):
            touch(block)
        return hit
