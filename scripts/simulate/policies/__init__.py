"""One eviction policy a file, each with its source; `CONTESTANTS` has them by the name the command knows.

fifo, lru, lfu, lru2, sieve, s3_fifo, w_tinylfu
                    the textbook: as published, with published parameters
optimum, infinite   what no policy can pass; what no size can
ours                the product's own
"""

from collections.abc import Callable
from typing import Any

from scripts.simulate.contract import Contestant, Policy
from scripts.simulate.policies.fifo import Fifo
from scripts.simulate.policies.infinite import Infinite
from scripts.simulate.policies.lfu import Lfu
from scripts.simulate.policies.lru import Lru
from scripts.simulate.policies.lru2 import Lru2
from scripts.simulate.policies.optimum import Optimum
from scripts.simulate.policies.ours import ours
from scripts.simulate.policies.s3_fifo import S3Fifo
from scripts.simulate.policies.sieve import Sieve
from scripts.simulate.policies.w_tinylfu import WTinyLfu
from scripts.simulate.prefix_cache import PrefixCache
from scripts.simulate.trace import Trace

__all__ = ["CONTESTANTS", "INFINITE", "OPTIMUM", "OURS", "TEXTBOOK"]

OURS, OPTIMUM, INFINITE = "ours", "optimum", "infinite"


def _textbook(policy: Callable[[int], Policy]) -> Contestant[int]:
    return Contestant(lambda capacity, trace: PrefixCache(policy(capacity)), Trace.blocks_of)


_TEXTBOOK: dict[str, Contestant[int]] = {
    "fifo": _textbook(Fifo),
    "lru": _textbook(Lru),
    "lfu": _textbook(Lfu),
    "lru-2": _textbook(Lru2),
    "sieve": _textbook(Sieve),
    "s3-fifo": _textbook(S3Fifo),
    "w-tinylfu": _textbook(WTinyLfu),
}
TEXTBOOK = tuple(_TEXTBOOK)
CONTESTANTS: dict[str, Contestant[Any]] = {
    **_TEXTBOOK,
    OURS: Contestant(lambda capacity, trace: ours(capacity), Trace.names_of),
    OPTIMUM: Contestant(Optimum, Trace.blocks_of),
    INFINITE: Contestant(lambda capacity, trace: Infinite(), Trace.blocks_of),
}
