"""Random lives of a cache, against a model that knows only names and times."""

import shutil
import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from cachemgr import BlockHash, Lease, PendingBlock
from tests.cachemgr.host import Host, chain, payload_of, read

TTL_S = 100.0
LENGTH = 8
which = st.integers(0, 2)


class CacheLife(RuleBasedStateMachine):
    """Three chains; the second shares the first half of the first. Shared by both machines below."""

    blocks = 64
    refreshes_to_make_room = False
    leases: Bundle[tuple[Lease, list[BlockHash]]] = Bundle("leases")
    reservations: Bundle[tuple[PendingBlock, list[BlockHash], int]] = Bundle("reservations")

    @initialize()
    def start(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="tensorcache-test-", dir="/dev/shm"))
        self.host = Host(self.directory)
        self.cache = self.host.open(blocks=self.blocks, ttl_s=TTL_S)
        first, second = chain(self.cache, LENGTH), chain(self.cache, LENGTH, seed=1)
        self.chains = [first, first[:4] + second[4:], chain(self.cache, LENGTH, seed=2)]
        self.used: dict[BlockHash, float] = {}
        self.written: set[BlockHash] = set()
        self.pins: Counter[BlockHash] = Counter()

    def alive(self, name: BlockHash) -> bool:
        pinned = self.pins[name] > 0
        return name in self.used and (pinned or self.used[name] > self.host.clock.now - TTL_S)

    def run_of(self, hashes: list[BlockHash]) -> int:
        return next((row for row, name in enumerate(hashes) if not self.alive(name)), len(hashes))

    @rule(target=leases, which=which)
    def acquire(self, which: int) -> tuple[Lease, list[BlockHash]]:
        lease = self.cache.acquire(self.chains[which], deadline=None)
        names = self.chains[which][: lease.blocks]
        self.check_run(which, lease.blocks)
        self.pins.update(names)
        return lease, names

    @rule(held=leases)
    def restore(self, held: tuple[Lease, list[BlockHash]]) -> None:
        lease, names = held
        if lease in self.released:
            return
        seen = []

        def sink(blocks: range, payloads: object) -> None:
            for block, payload in zip(blocks, payloads, strict=True):  # type: ignore[call-overload]
                assert payload.tobytes() == payload_of(names[block]).tobytes()
                seen.append(block)

        assert self.cache.restore(lease, first=0, sink=sink) == len(names)
        assert seen == list(range(len(names)))

    @property
    def released(self) -> list[Lease]:
        return self.__dict__.setdefault("_released", [])

    @rule(held=consumes(leases))
    def release(self, held: tuple[Lease, list[BlockHash]]) -> None:
        lease, names = held
        lease.release()
        self.released.append(lease)
        for name in names:
            self.pins[name] -= 1
            if not self.pins[name]:
                self.used[name] = self.host.clock.now

    @rule(target=reservations, which=which, index=st.integers(0, LENGTH - 1))
    def prepare(self, which: int, index: int) -> object:
        hashes = self.chains[which]
        pending = self.cache.prepare(hashes, index)
        if self.refreshes_to_make_room:
            self.refresh(hashes[:index])
        self.check_prepared(hashes[index], pending)
        if pending is None:
            return None
        self.written.add(hashes[index])
        return pending, hashes, index

    @rule(which=which, count=st.integers(1, LENGTH))
    def fill(self, which: int, count: int) -> None:
        for index in range(count):
            held = self.prepare(which, index)
            if held is not None:
                self.commit(held)

    @rule(held=consumes(reservations))
    def commit(self, held: tuple[PendingBlock, list[BlockHash], int] | None) -> None:
        if held is None:
            return
        pending, hashes, index = held
        pending.payload[:] = payload_of(hashes[index])
        self.cache.commit(pending)
        now = self.host.clock.now
        self.written.discard(hashes[index])
        self.used[hashes[index]] = now
        if self.refreshed_by_commit(hashes[0]):
            self.refresh(hashes[:index])

    def refreshed_by_commit(self, front: BlockHash) -> bool:
        now = self.host.clock.now
        return self.alive(front) and not self.pins[front] and self.used[front] <= now - TTL_S / 4

    def refresh(self, names: list[BlockHash]) -> None:
        for name in names:
            if self.alive(name) and not self.pins[name]:
                self.used[name] = self.host.clock.now

    @rule(held=consumes(reservations))
    def abort(self, held: tuple[PendingBlock, list[BlockHash], int] | None) -> None:
        if held is not None:
            self.cache.abort(held[0])
            self.written.discard(held[1][held[2]])

    @rule(seconds=st.sampled_from([1.0, 30.0, 60.0, 150.0]))
    def wait(self, seconds: float) -> None:
        self.host.clock.now += seconds

    @rule(which=which)
    def look_up(self, which: int) -> None:
        self.check_run(which, self.cache.lookup(self.chains[which]))

    def check_run(self, which: int, found: int) -> None:
        assert found == self.run_of(self.chains[which])

    def check_prepared(self, name: BlockHash, pending: PendingBlock | None) -> None:
        assert (pending is None) == (self.alive(name) or name in self.written)

    @invariant()
    def whole(self) -> None:
        self.cache.check_integrity()
        assert self.cache.counters()["cache_pins"] == sum(self.pins.values())

    def teardown(self) -> None:
        self.host.close()
        shutil.rmtree(self.directory)


class SmallCacheLife(CacheLife):
    """Five slots, evicted all the time: what is found may be less, never other than what was written."""

    blocks = 5
    refreshes_to_make_room = (
        True  # it may, when an ancestor would have to go; the model only bounds from above
    )

    def refreshed_by_commit(self, front: BlockHash) -> bool:
        return True

    def check_run(self, which: int, found: int) -> None:
        assert found <= self.run_of(self.chains[which])

    def check_prepared(self, name: BlockHash, pending: PendingBlock | None) -> None:
        assert pending is None or name not in self.written

    @rule(which=which)
    def read(self, which: int) -> None:
        lease = self.cache.acquire(self.chains[which], deadline=None)
        names = self.chains[which][: lease.blocks]
        lease.release()
        for name in names:
            if not self.pins[name]:
                self.used[name] = self.host.clock.now
        assert read(self.cache, self.chains[which]) == len(names)

    @invariant()
    def bounded(self) -> None:
        assert self.cache.counters()["cache_resident_blocks"] <= self.blocks


CacheLife.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
SmallCacheLife.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCacheLife = CacheLife.TestCase
TestSmallCacheLife = SmallCacheLife.TestCase
