"""The tier in Redis: which blocks of a run it has, bringing them, keeping others.

Invariants
- No call outlives its deadline; whatever a server does is a miss, a counter, and news for its breaker.
- A connection on which a caller left anything unread is never used again.
- A block is in a store only after its header named it and its tag passed, whatever lay under its key.
Threads: the IO loop.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from cachemgr.cluster.background import Background
from cachemgr.host_contract import HostStore
from cachemgr.redis_address import RedisAddress
from cachemgr.redis_client import Kind, RedisTrouble
from cachemgr.shard import HEADER_NBYTES, BlockAddress
from cachemgr.tiers.redis_tier.arriving import ArrivingRun
from cachemgr.tiers.redis_tier.counts import RedisCounts
from cachemgr.tiers.redis_tier.keys import BlockKeys, probe_key
from cachemgr.tiers.redis_tier.places import ClusterServers, OneServer, Places
from cachemgr.tiers.redis_tier.server import Clock, Manners, Server
from cachemgr.tiers.redis_tier.settings import RedisTierSettings
from cachemgr.tiers.redis_tier.writing import WriteBehind

_CLOSE_S = 2.0
"""For writing what waits."""
_LOOKS = 5
"""Looks at the servers per `breaker_s`."""
_SHORTEST_LOOK_S = 0.05

Run = tuple[Server, Sequence[BlockAddress]]


class RedisTier:
    """A LowerTier. `clock`: monotonic seconds, of breakers and of what was offered lately."""

    name = "redis"

    def __init__(self, settings: RedisTierSettings, *, cluster: str, clock: Clock = time.monotonic) -> None:
        self.admit_seen = settings.admit_seen
        self._settings = settings
        self._cluster = cluster
        self._clock = clock
        self._address = settings.address()
        self._counts = RedisCounts()
        self._ttl = b"%d" % int(settings.ttl_s * 1000)
        self._keys: dict[bytes, BlockKeys] = {}
        self._arriving: dict[ArrivingRun, HostStore] = {}
        self._places: Places | None = None
        self._writes: WriteBehind | None = None
        self._looks = Background("redis-tier-looks", self._look)

    @property
    def usable(self) -> bool:
        """See LowerTier."""
        return self._places is not None and self._places.usable

    async def start(self) -> None:
        """See LowerTier."""
        self._places = self._make_places()
        self._writes = WriteBehind(
            self._settings, self._places, keys_of=self._keys_of, counts=self._counts, clock=self._clock
        )
        self._looks.start()
        self._writes.start()

    async def known(self, store: HostStore, blocks: Sequence[BlockAddress], *, deadline: float) -> int:
        """See LowerTier."""
        self._counts.known_calls += 1
        keys = self._keys_of(store)
        by_server: dict[Server, list[int]] = {}
        at = 0
        for server, run in self._runs(blocks):
            by_server.setdefault(server, []).extend(range(at, at + len(run)))
            at += len(run)
        there = [False] * len(blocks)

        async def ask(server: Server, indices: list[int]) -> None:
            commands = [(b"EXISTS", keys.key(blocks[index])) for index in indices]
            try:
                answers = await server.ask(commands, deadline=deadline)
            except RedisTrouble:
                return  # counted
            for index, answer in zip(indices, answers, strict=True):
                there[index] = answer == 1
                if isinstance(answer, RedisTrouble):
                    self._hear([answer])
                elif not there[index] and self._writes is not None:
                    self._writes.offered.forget(blocks[index].hash)

        await asyncio.gather(*(ask(server, indices) for server, indices in by_server.items()))
        known = next((index for index, one in enumerate(there) if not one), len(there))
        self._counts.known_blocks += known
        return known

    async def get(
        self,
        store: HostStore,
        blocks: Sequence[BlockAddress],
        *,
        deadline: float,
        arrived: Callable[[int], None],
    ) -> None:
        """See LowerTier. One exchange per server in turn: a run comes in order."""
        self._counts.get_calls += 1
        window = max(1, self._settings.window_bytes // (HEADER_NBYTES + store.payload_nbytes))
        keys = self._keys_of(store)
        for server, run in self._runs(blocks):
            requests = [self._question(keys.key(block)) for block in run]
            arriving = ArrivingRun(store, run, requests, window=window, arrived=arrived, counts=self._counts)
            self._arriving[arriving] = store
            try:
                await server.exchange(arriving, deadline=deadline)
                ended = arriving.ended
            except RedisTrouble:
                ended = True  # counted
            finally:
                del self._arriving[arriving]
                arriving.drop()
                self._settle(arriving, keys)
            if ended:
                return

    def put(self, store: HostStore, blocks: Sequence[BlockAddress]) -> None:
        """See LowerTier."""
        if self._writes is None:
            self._counts.put_dropped += len(blocks)
        else:
            self._writes.put(store, blocks)

    async def forget(self, store: HostStore) -> None:
        """See LowerTier."""
        for arriving in [one for one, of in self._arriving.items() if of is store]:
            arriving.drop()
        if self._writes is not None:
            await self._writes.forget(store, limit_s=_CLOSE_S)

    def counters(self) -> dict[str, float]:
        """See LowerTier."""
        waiting = 0 if self._writes is None else self._writes.waiting
        failures = self._looks.failures + (0 if self._writes is None else self._writes.failures)
        return {
            **self._counts.totals(),
            "failed_calls_total": float(failures),
            "queue_blocks": float(waiting),
            "usable": float(self.usable),
            "breaker_open": float(1 if self._places is None else self._places.left_alone),
        }

    async def close(self) -> None:
        """See LowerTier."""
        writes, self._writes = self._writes, None
        if writes is not None:
            await writes.close(limit_s=_CLOSE_S)
        await self._looks.close()
        places, self._places = self._places, None
        if places is not None:
            await places.close()

    async def _look(self) -> float:
        if self._places is not None:
            await self._places.look()
        return max(_SHORTEST_LOOK_S, self._settings.breaker_s / _LOOKS)

    def _make_places(self) -> Places:
        if self._settings.cluster:
            return ClusterServers(self._address, make=self._make_server, clock=self._clock)
        return OneServer(self._make_server(self._address))

    def _make_server(self, address: RedisAddress) -> Server:
        settings = self._settings
        manners = Manners(
            call_s=settings.call_s, breaker_s=settings.breaker_s, connections=settings.connections + 1,
            ttl_ms=int(settings.ttl_s * 1000), probe=probe_key(self._cluster),
        )  # fmt: skip
        return Server(
            address, manners, counts=self._counts, clock=self._clock, worry=self._looks.wake,
            lost=self._lost_touch,
        )  # fmt: skip

    def _lost_touch(self) -> None:
        """Whoever comes back may have come back empty, also if that took so little time that nobody asked."""
        if self._writes is not None:
            self._writes.offered.clear()

    def _keys_of(self, store: HostStore) -> BlockKeys:
        keys = self._keys.get(store.format_id)
        if keys is None:
            keys = self._keys[store.format_id] = BlockKeys(self._cluster, store.format_id)
        return keys

    def _runs(self, blocks: Sequence[BlockAddress]) -> Iterator[Run]:
        """`blocks` in order, cut where another server begins, up to the first that nobody has."""
        if self._places is None:
            return
        place = self._places.server_of
        for server, run in groupby(blocks, key=lambda block: place(block.segment)):
            if server is None:
                return
            yield server, list(run)

    def _question(self, key: bytes) -> bytes:
        ttl = self._ttl
        return b"*4\r\n$5\r\nGETEX\r\n$%d\r\n%s\r\n$2\r\nPX\r\n$%d\r\n%s\r\n" % (len(key), key, len(ttl), ttl)

    def _settle(self, arriving: ArrivingRun, keys: BlockKeys) -> None:
        """What a run, ended or not, tells about what is there."""
        self._hear(arriving.refusals)
        if self._writes is None:
            return
        self._writes.remove(arriving.wrong, keys)
        for block in (*arriving.wrong, *arriving.absent):
            self._writes.offered.forget(block.hash)

    def _hear(self, refusals: Sequence[RedisTrouble]) -> None:
        if self._places is not None and any(one.kind is Kind.ELSEWHERE for one in refusals):
            self._places.stale()
            self._looks.wake()
