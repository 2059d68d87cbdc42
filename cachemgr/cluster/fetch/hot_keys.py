"""Segments that are read too often for their owners get extra owners, and readers hear of it.

Serving side (`HotKeys`): reads are counted over windows, in a count-min sketch for the rates and a sketch of
frequent items for who they are. A segment is hot if this owner would see more than `hot_reads_per_s` of it
without extra owners, and more than twice what it sees of another segment on average. It gets
k = ⌈reads of all its owners / threshold⌉ extra owners: more at once, while a window is running, fewer only
after two windows that called for fewer. They are given its blocks first; k is said once they acknowledged.

Reading side (`HotHints`): what answers said, for two windows.

Invariants
- Only an owner of the ring in force makes a segment hot; an extra owner does not, however often it is read.
- k is that of the ring it was acknowledged under: a new ring starts at 0.
- All is bounded: sketches, hot segments, hints.

Threads: the IO loop.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from math import ceil

from datasketches import count_min_sketch, frequent_items_error_type, frequent_items_sketch

from cachemgr.cluster.contract import Rings, Spawn
from cachemgr.cluster.settings import ClusterSettings
from cachemgr.contract import BlockHash
from cachemgr.ring import NodeId, Ring, extra_owners, position_of

Spread = Callable[[BlockHash, tuple[NodeId, ...]], Awaitable[int]]
"""Gives all blocks of a segment that are here to these nodes; how many, from the first, acknowledged all."""

_ROWS, _COLUMNS = 4, 2048
"""Counts too high by 0.13 % of all reads, with a probability of 2 %."""
_TOP_LOG2 = 10
"""Of 768 segments or less: what takes more than 0.35 % of all reads is among the frequent ones."""
_MOST_HOT = 64
_MOST_SEEN = 4096
"""Segments told apart for the mean; with more, it comes out too high, and a segment has to be hotter."""
_SHORTEST = 0.1
"""Of a window: a running rate is one over at least so long, so that a few reads at its start are no storm."""
_CALM_WINDOWS = 2
_MARGIN = 1.25
"""A running window must call for so much more before k goes up, a whole one for so much less to go down."""
_COLD = 0.5


@dataclass(slots=True)
class _Hot:
    """A hot segment under one ring, and its reads here since k or the window changed."""

    ring: Ring
    most: int
    since: float
    reads: int = 0
    wanted: int = 0
    held: int = 0
    """How many extra owners have it, from the first: the k that is said."""
    calm: int = 0
    pushing: bool = False
    again: float = 0.0
    """When extra owners that did not take it are asked again."""


class HotKeys:
    """Counts what this node serves. `spawn` runs `spread` in the background."""

    def __init__(
        self,
        rings: Rings,
        spread: Spread,
        *,
        spawn: Spawn,
        settings: ClusterSettings,
        clock: Callable[[], float],
    ) -> None:
        self._rings = rings
        self._spread = spread
        self._spawn = spawn
        self._clock = clock
        self._threshold = settings.hot_reads_per_s
        self._window_s = settings.hot_window_s
        self._shortest_s = settings.hot_window_s * _SHORTEST
        self._hot: dict[BlockHash, _Hot] = {}
        self._look_every = max(1, min(64, int(self._threshold * self._window_s / 256)))
        self._last: list[tuple[BlockHash, float]] = []
        self._total = 0
        self._unseen = 0
        self._open(clock())

    def observe(self, segment: BlockHash, n: int = 1) -> None:
        """`n` reads of a segment were served."""
        now = self._clock()
        if now >= self._ends:
            self._roll(now)
        self._rates.update(_number(segment), n)
        self._top.update(segment, n)
        self._total += n
        if len(self._seen) < _MOST_SEEN:
            self._seen.add(segment)
        if self._hot and (hot := self._hot.get(segment)) is not None:
            hot.reads += n
        self._unseen += 1
        if self._unseen >= self._look_every:
            self._unseen = 0
            self._look(segment, now)

    def extra(self, segment: BlockHash) -> int:
        """How many extra owners have it now; say so with every answer that has blocks of it."""
        if not self._hot:
            return 0
        now = self._clock()
        if now >= self._ends:
            self._roll(now)
        hot = self._hot.get(segment)
        return hot.held if hot is not None and hot.ring is self._rings.ring else 0

    def hot(self) -> dict[BlockHash, int]:
        """All hot segments and how many extra owners have each, for whoever may know."""
        return {segment: self.extra(segment) for segment in list(self._hot)}

    def top(self) -> list[tuple[BlockHash, float]]:
        """The most read segments of the last whole window and their reads per second, highest first."""
        return list(self._last)

    def close(self) -> None:
        """No more reads come; without this the sketches' library complains when the process ends."""
        self._hot.clear()
        del self._rates, self._top

    def _open(self, now: float) -> None:
        """Begin a window."""
        self._began, self._ends = now, now + self._window_s
        self._rates = count_min_sketch(_ROWS, _COLUMNS)
        self._top = frequent_items_sketch(_TOP_LOG2)
        self._seen: set[BlockHash] = set()
        self._total = 0
        self._unseen = 0
        for hot in self._hot.values():
            hot.since, hot.reads = now, 0

    def _roll(self, now: float) -> None:
        """Decide by the window that ended; nobody hears of those in which nothing was read."""
        silent = int((now - self._ends) / self._window_s)
        frequent = self._top.get_frequent_items(frequent_items_error_type.NO_FALSE_NEGATIVES)
        rates = {row[0]: self._estimate(row[0]) / self._window_s for row in frequent[:_MOST_HOT]}
        self._last = [] if silent else sorted(rates.items(), key=lambda item: -item[1])
        if silent >= _CALM_WINDOWS:
            self._hot.clear()
        elif not silent:
            for segment in [*self._hot, *(new for new in rates if new not in self._hot)]:
                self._decide(segment, self._ends, ended=True)
        self._open(now)

    def _look(self, segment: BlockHash, now: float) -> None:
        """The window is running: a storm is not left alone until its end."""
        if segment in self._hot or self._estimate(segment) > self._threshold * self._shortest_s:
            self._decide(segment, now, ended=False)

    def _estimate(self, segment: BlockHash) -> float:
        return float(self._rates.get_estimate(_number(segment)))

    def _decide(self, segment: BlockHash, now: float, *, ended: bool) -> None:
        """Set k by what this node sees of a segment."""
        ring = self._rings.ring
        base = ring.owners(position_of(segment), 1 + ring.replicas)
        hot = self._hot.get(segment)
        if hot is not None and (hot.ring is not ring or self._rings.node not in base):
            del self._hot[segment]
            hot = None
        if self._rings.node not in base:
            return
        since, reads = (hot.since, hot.reads) if hot else (self._began, self._estimate(segment))
        rate = reads / max(now - since, self._shortest_s) / (1.0 if ended else _MARGIN)
        whole = rate * (len(base) + (hot.held if hot else 0))
        demand = whole / len(base)
        everything = self._total / max(now - self._began, self._shortest_s)
        others = max(0.0, everything - rate) / max(1, len(self._seen) - 1)
        if hot is None:
            if demand <= self._threshold or demand <= 2 * others or len(self._hot) >= _MOST_HOT:
                return
            most = len(extra_owners(ring, segment, len(ring.state.nodes)))
            hot = self._hot[segment] = _Hot(ring, most, since=now)
        wanted = min(hot.most, ceil(whole / self._threshold))
        if wanted > hot.wanted:
            hot.wanted, hot.calm = wanted, 0
        elif ended and now - since >= self._shortest_s:
            cold = demand < _COLD * self._threshold or demand < others
            self._calm_down(segment, hot, 0 if cold else ceil(whole * _MARGIN / self._threshold))
        if hot.held < hot.wanted and not hot.pushing and now >= hot.again:
            hot.pushing = True
            self._spawn(self._push(segment, hot))

    def _calm_down(self, segment: BlockHash, hot: _Hot, fewer: int) -> None:
        """A whole window called for no more than there are: fewer, if it was not the first that did."""
        hot.calm = hot.calm + 1 if fewer < hot.wanted else 0
        if hot.calm < _CALM_WINDOWS:
            return
        hot.calm, hot.wanted, hot.held = 0, fewer, min(hot.held, fewer)
        if not fewer:
            del self._hot[segment]

    async def _push(self, segment: BlockHash, hot: _Hot) -> None:
        """Give the segment to the extra owners that lack it; again if more are wanted when that is done."""
        try:
            while self._hot.get(segment) is hot and hot.held < hot.wanted and hot.ring is self._rings.ring:
                nodes = extra_owners(hot.ring, segment, hot.wanted)
                had = hot.held
                took = await self._spread(segment, nodes[had:])
                hot.held = min(had + took, hot.wanted)
                hot.since, hot.reads = self._clock(), 0  # what was read before was spread over fewer
                if had + took < len(nodes):
                    hot.again = self._ends
                    return
        finally:
            hot.pushing = False


class HotHints:
    """What peers said of hot segments, each for two windows, at most `limit` of them."""

    def __init__(
        self, *, settings: ClusterSettings, clock: Callable[[], float], limit: int = 1024
    ) -> None:
        self._kept_s = 2 * settings.hot_window_s
        self._clock = clock
        self._limit = limit
        self._known: dict[BlockHash, tuple[int, float]] = {}

    def note(self, hot: Mapping[BlockHash, int]) -> None:
        """An answer came with these."""
        until = self._clock() + self._kept_s
        for segment, k in hot.items():
            self._known.pop(segment, None)
            if k <= 0:
                continue
            if len(self._known) >= self._limit:
                del self._known[next(iter(self._known))]  # the one heard of longest ago
            self._known[segment] = (k, until)

    def extra(self, ring: Ring, segment: BlockHash) -> tuple[NodeId, ...]:
        """Its extra owners, as far as this node knows."""
        known = self._known.get(segment)
        if known is None:
            return ()
        k, until = known
        if self._clock() >= until:
            del self._known[segment]
            return ()
        return extra_owners(ring, segment, min(k, len(ring.state.nodes)))


def _number(segment: BlockHash) -> int:
    """64 bits of a name, signed: what the sketch hashes."""
    return int.from_bytes(segment[:8], "little", signed=True)
