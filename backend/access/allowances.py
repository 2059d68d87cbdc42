"""Counts what each principal uses, and refuses what is beyond their allowance or would leave others no room.

A principal may have as many requests open as there is room left for others, and never more than half of all
(the dynamic threshold of A. Choudhury and E. Hahne, "Dynamic queue length thresholds for shared-memory packet
switches", IEEE/ACM Transactions on Networking 6(2), 1998, with α = 1): one that floods gets half, two get a
third each, and whoever has nothing open is let in.

Invariants
- Refusing changes nothing: what was refused costs nothing later.
- A principal without open requests and with full buckets is forgotten, so that the memory is that of those
  who ask now.

Threads: any; one lock, held for arithmetic alone.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from backend.access.contract import Allowance, Caller
from backend.access.token_bucket import TokenBucket
from backend.errors import Overloaded

_LOOKED_AT: Final = 2
"""Accounts that each request looks at in passing, whether they can be forgotten: more than it can add."""


@dataclass(slots=True)
class _Account:
    """What one principal has open and has used."""

    allowance: Allowance
    requests: TokenBucket = field(default_factory=TokenBucket)
    tokens: TokenBucket = field(default_factory=TokenBucket)
    open: int = 0

    def fill(self, now: float) -> None:
        self.requests.fill(self.allowance.requests_per_s, now)
        self.tokens.fill(self.allowance.tokens_per_s, now)


class CountedAllowances:
    """Allowances for one model on one server."""

    def __init__(
        self,
        capacity: int,
        principals: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`capacity`: see `bound`; it is shared if `principals` > 1."""
        self._capacity = capacity
        self._principals = principals
        self._clock = clock
        self._lock = threading.Lock()
        self._accounts: OrderedDict[str, _Account] = OrderedDict()
        self._open = 0

    @property
    def accounts(self) -> int:
        """Principals that are remembered."""
        return len(self._accounts)

    def bound(self, capacity: int) -> None:
        """See Allowances."""
        self._capacity = capacity

    def enter(self, caller: Caller) -> None:
        """See Allowances. The node's own probe is let in whatever others do."""
        if caller.probe_only:
            return
        shared = self._principals() > 1
        with self._lock:
            now = self._clock()
            self._forget(now)
            account = self._accounts.get(caller.principal) or _Account(caller.allowance)
            account.allowance = caller.allowance
            account.fill(now)
            self._check_open(caller.principal, account, shared=shared)
            _check_requests(caller.principal, account)
            _check_debt(caller.principal, account)
            account.requests.take(1)
            account.open += 1
            self._open += 1
            self._accounts[caller.principal] = account

    def charge(self, caller: Caller, tokens: int) -> None:
        """See Allowances. A prompt may be longer than the bucket: then it is paid off later."""
        if caller.probe_only:
            return
        with self._lock:
            account = self._accounts[caller.principal]
            account.fill(self._clock())
            _check_debt(caller.principal, account)
            account.tokens.take(tokens)

    def leave(self, caller: Caller, *, tokens: int) -> None:
        """See Allowances."""
        if caller.probe_only:
            return
        with self._lock:
            account = self._accounts[caller.principal]
            assert account.open > 0, "it left more often than it entered"
            account.fill(self._clock())
            account.tokens.take(tokens)
            account.open -= 1
            self._open -= 1

    def _check_open(self, principal: str, account: _Account, *, shared: bool) -> None:
        concurrent, found = account.allowance.concurrent, account.open
        if concurrent is not None and found >= concurrent:
            raise Overloaded(
                f"principals.{principal}.concurrent: at most {concurrent} requests may be open, "
                f"found {found}: come again when one of them has ended"
            )
        half = max(1, self._capacity // 2)
        # how many others have open is their business: the text says nothing of it
        if shared and found >= max(1, min(half, self._capacity - self._open)):
            raise Overloaded(
                f"principals.{principal}: at most {half} of {self._capacity} requests may be open, and fewer "
                f"while others ask, found {found}: come again when one of them has ended"
            )

    def _forget(self, now: float) -> None:
        for _ in range(min(_LOOKED_AT, len(self._accounts))):
            principal, account = next(iter(self._accounts.items()))
            if account.open == 0 and _rested(account, now):
                del self._accounts[principal]
            else:
                self._accounts.move_to_end(principal)


def _rested(account: _Account, now: float) -> bool:
    """It is as if it were new."""
    account.fill(now)
    allowance = account.allowance
    return account.requests.full(allowance.requests_per_s) and account.tokens.full(allowance.tokens_per_s)


def _check_requests(principal: str, account: _Account) -> None:
    rate = account.allowance.requests_per_s
    if wait := account.requests.wait_s(1, rate):
        raise Overloaded(
            f"principals.{principal}.requests_per_s: at most {rate:g} requests a second, found more: "
            f"come again in {_shown(wait)}"
        )


def _check_debt(principal: str, account: _Account) -> None:
    rate = account.allowance.tokens_per_s
    if wait := account.tokens.wait_s(0, rate):
        raise Overloaded(
            f"principals.{principal}.tokens_per_s: at most {rate:g} tokens a second, "
            f"found {-account.tokens.level:.0f} too many: come again in {_shown(wait)}"
        )


def _shown(wait_s: float) -> str:
    """Rounded up, so that who waits so long has waited long enough."""
    return f"{wait_s + 0.05:.1f} s" if wait_s < 100 else f"{wait_s + 0.5:.0f} s"
