"""The step loop, readers and writers from other nodes, and a sweeper, all at once on a few slots."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import cachemgr.cache
from cachemgr import BlockHash, HostCache
from cachemgr.host_contract import HeldShard, HostStore
from tests.cachemgr.copier import Copier
from tests.cachemgr.host import Host, chain, fill, payload_of, write
from tests.cachemgr.node import Node, is_whole, open_node
from tests.waiting import wait_until

CHAINS, LENGTH = 5, 6
SECONDS = 2.0


class Life:
    """Threads that call until the time is over; what any of them raises, the test raises."""

    def __init__(self, host: Host, *, blocks: int, whole: Callable[[HeldShard], bool] = is_whole) -> None:
        self.far = open_node(host, "far", blocks=64)
        self.cache = host.open(node="near", blocks=blocks, remote=self._connect)
        self.near = Node(self.cache, self._store)
        self.chains = [chain(self.cache, LENGTH, seed=seed) for seed in range(CHAINS)]
        for hashes in self.chains:
            fill(self.far.cache, hashes)
        self.restored = self.fetched = self.served = self.received = 0
        self._whole = whole
        self._clock = host.clock
        self._failures: list[BaseException] = []

    def run(self, *parts: Callable[[list[BlockHash], int], None], meanwhile: Callable[[], None]) -> None:
        until = time.monotonic() + SECONDS

        def go_on(part: Callable[[list[BlockHash], int], None], turn: int) -> None:
            try:
                while time.monotonic() < until and not self._failures:
                    turn += 1
                    part(self.chains[turn * 7 % CHAINS], turn)
            except BaseException as error:
                self._failures.append(error)

        threads = [threading.Thread(target=go_on, args=(part, turn)) for turn, part in enumerate(parts)]
        for thread in threads:
            thread.start()
        meanwhile()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        if self._failures:
            raise self._failures[0]

    def step(self, hashes: list[BlockHash], turn: int) -> None:
        """Acquire with or without a fetch, restore or not, write what was not restored."""
        lease = self.cache.acquire(hashes, deadline=self._clock() + 60 if turn % 3 else None)
        while turn % 2 and not lease.ready:
            time.sleep(0)
        usable = 0
        if lease.ready:

            def sink(blocks: range, payloads: Sequence[npt.NDArray[np.uint8]]) -> None:
                for block, payload in zip(blocks, payloads, strict=True):
                    assert payload.tobytes() == payload_of(hashes[block]).tobytes()

            usable = self.cache.restore(lease, first=0, sink=sink)
            self.restored += usable
        lease.release()
        for index in range(usable, LENGTH):
            write(self.cache, hashes, index)

    def serve(self, hashes: list[BlockHash], turn: int) -> None:
        """Hold, read twice, let go: the bytes are the block's as long as it is held."""
        held = [shard for shard in self.near.store.hold(hashes[turn % LENGTH :]) if shard is not None]
        for _ in range(2):
            assert all(map(self._whole, held))
            time.sleep(0)
        self.served += len(held)
        self.near.store.let_go(held)

    def receive(self, hashes: list[BlockHash], turn: int) -> None:
        self.received += self.far.give(self.near, hashes[turn % LENGTH :])

    def drop(self, hashes: list[BlockHash], turn: int) -> None:
        self.near.store.drop(hashes[:: 1 + turn % 3])
        self.near.store.missing(hashes)
        time.sleep(0.001)

    def ends_clean(self) -> None:
        assert self.restored and self.served and self.received  # noqa: PT018
        self._copier.settle()
        self.cache.check_integrity()
        counts = self.cache.counters()
        assert counts["cache_pins"] == 0
        assert counts["cache_fetched_blocks_total"] > 0
        assert fill(self.cache, chain(self.cache, 12, seed=99)) == 12, "every slot can still be evicted"

    def _connect(self, store: HostStore) -> Copier:
        self._store = store
        self._copier = Copier(store, self.far.store)
        return self._copier


def test_nobody_reads_what_another_writes(host: Host) -> None:
    life = Life(host, blocks=12)
    life.run(
        life.step, life.serve, life.receive, life.drop, life.serve, life.receive, meanwhile=lambda: None
    )
    life.ends_clean()
    counts = life.cache.counters()
    assert counts["cache_evicted_blocks_total"] > 0
    assert counts["cache_corrupt_blocks_total"] == 0


def test_nobody_reads_what_another_writes_while_arenas_are_deleted(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cachemgr.cache, "_REFRESH_INTERVAL_S", 0.02)
    life = Life(host, blocks=12, whole=is_whole_or_lost)

    def lose() -> None:
        for _ in range(4):
            wait_until(lambda: arena_of(life.cache))
            time.sleep(SECONDS / 8)
            Path(arena_of(life.cache) or "").unlink()

    life.run(life.step, life.serve, life.receive, life.drop, meanwhile=lose)
    wait_until(lambda: life.cache.counters()["cache_lost_arenas_total"] == 4)
    life.ends_clean()


def test_closing_in_the_middle_is_a_miss_for_everybody(host: Host) -> None:
    life = Life(host, blocks=12, whole=is_whole_or_lost)

    def close() -> None:
        time.sleep(SECONDS / 4)
        life.cache.close()

    life.run(life.serve, life.receive, life.drop, life.serve, life.receive, meanwhile=close)
    assert life.near.store.missing(life.chains[0]) == list(range(LENGTH))
    assert life.cache.counters()["cache_pins"] == 0
    assert fill(host.open(node="near", blocks=12), chain(life.cache, 12, seed=99)) == 12


def arena_of(cache: HostCache) -> Path | None:
    """The file of the cache's arena, if it has one at this moment."""
    return next((Path(arena.path) for arena in cache._files.held if Path(arena.path).exists()), None)


def is_whole_or_lost(held: HeldShard) -> bool:
    """Zeros are what a lost or closed arena gives; never another block's bytes."""
    return is_whole(held) or not any(held.payload)
