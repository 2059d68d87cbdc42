"""Real processes that read each other's arenas: a reload, a kill, and a writer faster than the reader."""

import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest

import cachemgr.cache
from cachemgr import BlockHash, HostCache
from cachemgr.shard import slot_nbytes
from tests.cachemgr.host import Host, chain, payload_of
from tests.cachemgr.peer_process import PEER_FORMAT, Peer, fill_peer
from tests.waiting import wait_until

PEER_STRIDE = slot_nbytes(PEER_FORMAT.payload_nbytes)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the arenas all the time instead of once a second."""
    monkeypatch.setattr(cachemgr.cache, "_REFRESH_INTERVAL_S", 0.005)
    monkeypatch.setattr(cachemgr.cache, "_REFRESH_SHARE", 0)


def restored(cache: HostCache, hashes: Sequence[BlockHash]) -> int:
    """How many blocks come back; every byte checked."""
    lease = cache.acquire(hashes, deadline=None)

    def sink(blocks: range, payloads: Sequence[np.ndarray]) -> None:
        for block, payload in zip(blocks, payloads, strict=True):
            assert payload.tobytes() == payload_of(hashes[block], PEER_FORMAT).tobytes()

    usable = cache.restore(lease, first=0, sink=sink)
    lease.release()
    return usable


def test_what_another_process_committed_is_read_where_it_is(
    host: Host, start_peer: Callable[..., Peer]
) -> None:
    peer = start_peer(blocks=40, arena_bytes=20 * PEER_STRIDE)
    assert peer.ask("fill", 1, 12) == 12
    cache = host.open(blocks=40, block_format=PEER_FORMAT)
    before = host.arenas()[0].read_bytes()
    assert restored(cache, chain(cache, 12, seed=1)) == 12
    counts = cache.counters()
    assert counts["cache_hit_blocks_total"] == counts["cache_foreign_hit_blocks_total"] == 12
    assert counts["cache_resident_blocks"] == counts["cache_pins"] == counts["cache_stale_blocks_total"] == 0
    assert counts["cache_foreign_blocks"] == 12
    assert host.arenas()[0].read_bytes() == before, "nothing was written there"


def test_a_reload_takes_the_arena_over_with_what_was_committed_late(
    host: Host, start_peer: Callable[..., Peer], eager: None
) -> None:
    old = start_peer(blocks=40)
    assert old.ask("fill", 1, 12) == 12
    new = host.open(blocks=40, block_format=PEER_FORMAT)
    assert new.counters()["cache_slots"] == 0
    assert restored(new, chain(new, 12, seed=1)) == 12, "warm before it has a slot"
    assert fill_peer(new, 3, seed=9) == 0
    assert old.ask("fill", 2, 20) == 20
    hashes = chain(new, 20, seed=2)
    wait_until(lambda: new.lookup(hashes) == 20)
    old.close()
    wait_until(lambda: new.counters()["cache_reattached_blocks_total"] == 32)
    wait_until(lambda: new.counters()["cache_foreign_blocks"] == 0)
    assert restored(new, hashes) == 20
    assert restored(new, chain(new, 12, seed=1)) == 12
    assert new.counters()["cache_foreign_arenas"] == 0
    assert fill_peer(new, 3, seed=9) == 3
    new.check_integrity()
    assert len(host.arenas()) == 1


@pytest.mark.parametrize("room", [True, False], ids=["taken over", "still read"])
def test_a_killed_process_leaves_its_blocks_to_a_living_one(
    host: Host, start_peer: Callable[..., Peer], eager: None, room: bool
) -> None:
    peer = start_peer(blocks=40, arena_bytes=20 * PEER_STRIDE)
    assert peer.ask("fill", 1, 12) == 12
    share = 40 if room else 20
    cache = host.open(blocks=40, block_format=PEER_FORMAT, arena_bytes=share * PEER_STRIDE)
    assert cache.counters()["cache_slots"] == 20
    peer.kill()
    if room:
        wait_until(
            lambda: cache.counters()["cache_arenas"] == 2 and not cache.counters()["cache_foreign_arenas"]
        )
    hashes = chain(cache, 12, seed=1)
    assert restored(cache, hashes) == 12
    assert cache.counters()["cache_foreign_hit_blocks_total"] == (0 if room else 12)
    cache.check_integrity()


def test_slots_rewritten_under_the_reader_never_yield_wrong_bytes(
    host: Host, start_peer: Callable[..., Peer], eager: None
) -> None:
    """Twelve chains through room for two: most of what is read is rewritten at about that time."""
    peer = start_peer(blocks=40, arena_bytes=20 * PEER_STRIDE)
    cache = host.open(blocks=40, block_format=PEER_FORMAT, arena_bytes=PEER_STRIDE)
    chains = [chain(cache, 8, seed=seed) for seed in range(12)]
    peer.ask("churn", 12, 8)
    ends, got = time.monotonic() + 4, 0
    enough = time.monotonic() + 20
    while time.monotonic() < ends or (
        time.monotonic() < enough and not (got and cache.counters()["cache_stale_blocks_total"])
    ):
        got += sum(restored(cache, hashes) for hashes in chains)
    counts = cache.counters()
    assert got > 0
    assert counts["cache_stale_blocks_total"] > 0
    assert counts["cache_corrupt_blocks_total"] == 0
    peer.kill()
    cache.check_integrity()
