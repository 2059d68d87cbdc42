"""Blocks on their way to Redis, in the background: straight from the arena, in batches for one server.

    put → queue (bounded) → PEXPIRE each of a batch ── there already: its time begins anew
                                                    └─ the rest is pinned, SET from where it lies, let go

Invariants
- What waits is names; bytes are pinned only while they are written, `batch_bytes` of them at a time.
- What nobody can use is removed before anything is written.
Threads: the IO loop.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from cachemgr.cluster.background import Background
from cachemgr.contract import BlockHash
from cachemgr.host_contract import HeldShard, HostStore
from cachemgr.redis_client import Kind, RedisTrouble, SmallAnswers
from cachemgr.redis_client.line import Buffer
from cachemgr.shard import HEADER_NBYTES, BlockAddress
from cachemgr.tiers.redis_tier.counts import RedisCounts
from cachemgr.tiers.redis_tier.keys import BlockKeys
from cachemgr.tiers.redis_tier.offered import OfferedLately
from cachemgr.tiers.redis_tier.places import Places
from cachemgr.tiers.redis_tier.refusing import Refusing
from cachemgr.tiers.redis_tier.server import WRITER_PARDONS, Clock, Server
from cachemgr.tiers.redis_tier.settings import RedisTierSettings

_ASKED_AT_ONCE = 256
"""Keys of one PEXPIRE exchange."""
_MOST_REMOVALS = 1024
_IDLE_S = 3600.0


class WriteBehind:
    """`keys_of(store)` names the blocks of a store."""

    def __init__(
        self,
        settings: RedisTierSettings,
        places: Places,
        *,
        keys_of: Callable[[HostStore], BlockKeys],
        counts: RedisCounts,
        clock: Clock,
    ) -> None:
        self._places = places
        self._keys_of = keys_of
        self._counts = counts
        self._most = settings.queue_blocks
        self._batch_bytes = settings.batch_bytes
        self._ttl_ms = int(settings.ttl_s * 1000)
        self._call_s = settings.call_s
        self._trouble_s = settings.breaker_s / 5
        self._queue: dict[BlockHash, tuple[HostStore, BlockAddress]] = {}
        self._removals: deque[tuple[BlockHash, bytes]] = deque(maxlen=_MOST_REMOVALS)
        """Segment and key."""
        self._opened = 0
        self._writing: HostStore | None = None
        self._empty = asyncio.Event()
        self._refusing = Refusing(clock)
        self._background = Background("redis-tier-writes", self._look)
        self.offered = OfferedLately(settings.ttl_s / 2, clock=clock)
        """What need not be offered again."""

    @property
    def waiting(self) -> int:
        """Blocks in the queue."""
        return len(self._queue)

    @property
    def failures(self) -> int:
        """Our own bugs."""
        return self._background.failures

    def start(self) -> None:
        """Begin, on the running loop."""
        self._background.start()

    def put(self, store: HostStore, blocks: Sequence[BlockAddress]) -> None:
        """Keep these; never waits."""
        if self._opened != self._counts.breaker_opened:  # who comes back may have come back empty
            self._opened = self._counts.breaker_opened
            self.offered.clear()
        queue, offered = self._queue, self.offered
        wanted = [block for block in blocks if block.hash not in queue and block.hash not in offered]
        room = max(0, self._most - len(self._queue))
        self._counts.put_dropped += max(0, len(wanted) - room)
        for block in wanted[:room]:
            self._queue[block.hash] = (store, block)
        if wanted:
            self._background.wake()

    def remove(self, blocks: Sequence[BlockAddress], keys: BlockKeys) -> None:
        """These are there with wrong bytes."""
        self._removals.extend((block.segment, keys.key(block)) for block in blocks)
        if blocks:
            self._background.wake()

    async def forget(self, store: HostStore, *, limit_s: float) -> None:
        """`store` is not used any more when this returns; what waits is written within `limit_s`, or not."""
        if any(of is store for of, _ in self._queue.values()) or self._writing is store:
            await self._drain(limit_s)
        for name in [name for name, (of, _) in self._queue.items() if of is store]:
            del self._queue[name]
        if self._writing is store:
            await self._background.restart()

    async def close(self, *, limit_s: float) -> None:
        """Write what waits until `limit_s` have passed; the rest counts as dropped. Idempotent."""
        await self._drain(limit_s)
        await self._background.close()
        self._counts.put_dropped += len(self._queue)
        self._queue.clear()

    async def _drain(self, limit_s: float) -> None:
        """Wait until nothing waits, if that is worth it."""
        if (self._queue or self._writing is not None) and self._places.usable:
            self._empty.clear()
            self._background.wake()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._empty.wait()

    async def _look(self) -> float:
        while self._queue or self._removals:
            if not self._places.usable:
                self._empty.set()  # nobody waits for a server that does not answer
                return self._trouble_s
            await self._remove()
            await self._write_some()
        self._empty.set()
        return _IDLE_S

    async def _remove(self) -> None:
        while self._removals:
            segment, key = self._removals.popleft()
            server = self._places.server_of(segment)
            if server is None:
                continue
            try:
                [removed] = await server.ask([(b"UNLINK", key)], pardons=WRITER_PARDONS)
            except RedisTrouble:
                continue  # counted; whoever reads it next will ask again
            self._counts.removed_blocks += removed == 1  # a reader may not, and only counts

    async def _write_some(self) -> None:
        """One batch: what is at the front of the queue, as far as it is of one store and one server's."""
        taken = self._take()
        if taken is None:
            return
        store, server, blocks = taken
        self._writing = store
        left = len(blocks)
        try:
            absent = await self._refresh(server, blocks, store)
            left = len(absent)
            for some in _batches(absent, self._batch_bytes // (HEADER_NBYTES + store.payload_nbytes)):
                await self._set(server, some, store)
                left -= len(some)
        except RedisTrouble:
            pass  # counted, and the breaker heard of it
        finally:
            self._writing = None
            self._counts.put_dropped += left

    def _take(self) -> tuple[HostStore, Server, list[BlockAddress]] | None:
        batch: list[BlockAddress] = []
        first: tuple[HostStore, Server] | None = None
        for store, block in self._queue.values():
            server = self._places.server_of(block.segment)
            if server is None:
                break
            if first is None:
                first = (store, server)
            if (store, server) != first or len(batch) == _ASKED_AT_ONCE:
                break
            batch.append(block)
        for block in batch:
            del self._queue[block.hash]
        if first is None and self._queue:  # nobody is known to have this segment
            del self._queue[next(iter(self._queue))]
            self._counts.put_dropped += 1
        return None if first is None else (*first, batch)

    async def _refresh(
        self, server: Server, blocks: Sequence[BlockAddress], store: HostStore
    ) -> list[BlockAddress]:
        """Those that are not there; the time of the others begins anew."""
        keys = self._keys_of(store)
        commands = [(b"PEXPIRE", keys.key(block), self._ttl_ms) for block in blocks]
        absent = []
        for block, answer in zip(blocks, await server.ask(commands, pardons=WRITER_PARDONS), strict=True):
            if isinstance(answer, RedisTrouble):
                self._refused(server, answer)
            elif answer:
                self._counts.put_known += 1
                self.offered.add(block.hash)
            else:
                absent.append(block)
        return absent

    async def _set(self, server: Server, blocks: Sequence[BlockAddress], store: HostStore) -> None:
        if self._refusing.now(server):
            self._counts.put_refused += len(blocks)
            return
        shards = [shard for shard in store.hold([block.hash for block in blocks]) if shard is not None]
        self._counts.put_gone += len(blocks) - len(shards)
        if not shards:
            return
        answers = SmallAnswers(others=len(shards))
        keys = self._keys_of(store)
        try:
            deadline = asyncio.get_running_loop().time() + self._call_s * len(shards)
            data = _questions(shards, keys, self._ttl_ms)
            await server.exchange(answers, deadline=deadline, data=data, pardons=WRITER_PARDONS)
        finally:
            store.let_go(shards)
        for shard, answer in zip(shards, answers.values, strict=True):
            if isinstance(answer, RedisTrouble):
                self._refused(server, answer)
            else:
                self._counts.put_blocks += 1
                self._counts.put_bytes += store.payload_nbytes
                self.offered.add(shard.address.hash)
                self._refusing.taken(server)

    def _refused(self, server: Server, trouble: RedisTrouble) -> None:
        self._counts.put_refused += 1
        if trouble.kind is Kind.ELSEWHERE:
            self._places.stale()
        else:
            self._refusing.refused(server, trouble)


def _batches(blocks: Sequence[BlockAddress], most: int) -> Iterator[Sequence[BlockAddress]]:
    step = max(1, most)
    return (blocks[start : start + step] for start in range(0, len(blocks), step))


def _questions(shards: Sequence[HeldShard], keys: BlockKeys, ttl_ms: int) -> Iterator[Buffer]:
    """`SET key value PX ttl` of each, the payload from where it lies."""
    ttl = b"%d" % ttl_ms
    end = b"\r\n$2\r\nPX\r\n$%d\r\n%s\r\n" % (len(ttl), ttl)
    before = b""
    for shard in shards:
        key, payload = keys.key(shard.address), shard.payload
        start = b"*5\r\n$3\r\nSET\r\n$%d\r\n%s\r\n" % (len(key), key)
        yield before + start + b"$%d\r\n" % (HEADER_NBYTES + payload.nbytes) + shard.header
        yield payload
        before = end
    yield before
