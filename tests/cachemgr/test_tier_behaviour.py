"""What every tier behind PrefixCache must do: give back what was committed, whole, to whoever may have it."""

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from cachemgr import BlockHash, Lease, PrefixCache
from tests.cachemgr.host import FORMAT, chain, fill, payload_of, read, write
from tests.cachemgr.open_tiers import OpenTier


def ignore(blocks: range, payloads: Sequence[npt.NDArray[np.uint8]]) -> None:
    """A sink that wants nothing."""


@pytest.mark.parametrize("blocks", [0, 1, 2, 15, 16, 17, 40])
def test_what_is_committed_comes_back(cache: PrefixCache, blocks: int) -> None:
    hashes = chain(cache, blocks)
    assert fill(cache, hashes) == blocks
    assert cache.lookup(hashes) == blocks
    assert read(cache, hashes) == blocks


@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 5, 8, 9])
def test_prompts_around_a_block_border(cache: PrefixCache, tokens: int) -> None:
    hashes = cache.hashes(np.arange(tokens), namespace="org")
    assert len(hashes) == tokens // FORMAT.block_tokens
    fill(cache, hashes)
    assert read(cache, hashes) == len(hashes)


def test_an_unknown_prompt_is_a_miss(cache: PrefixCache) -> None:
    fill(cache, chain(cache, 3))
    assert cache.lookup(chain(cache, 3, seed=1)) == 0
    assert read(cache, chain(cache, 3, seed=1)) == 0


def test_a_longer_prompt_finds_its_known_front_and_a_shorter_one_itself(cache: PrefixCache) -> None:
    fill(cache, chain(cache, 5))
    assert read(cache, chain(cache, 9)) == 5
    assert read(cache, chain(cache, 2)) == 2


def test_namespaces_and_salts_share_nothing(cache: PrefixCache) -> None:
    fill(cache, chain(cache, 3, namespace="org_1"))
    assert cache.lookup(chain(cache, 3, namespace="org_2")) == 0
    tokens = np.arange(12)
    fill(cache, cache.hashes(tokens, namespace="org_1", salt="2345"))
    assert cache.lookup(cache.hashes(tokens, namespace="org_12345", salt="")) == 0
    assert cache.lookup(cache.hashes(tokens, namespace="org_1", salt="234")) == 0


def test_a_block_is_invisible_until_committed(cache: PrefixCache) -> None:
    hashes = chain(cache, 1)
    pending = cache.prepare(hashes, 0)
    assert pending is not None
    pending.payload[:] = payload_of(hashes[0])
    assert cache.lookup(hashes) == 0
    assert read(cache, hashes) == 0
    cache.commit(pending)
    assert read(cache, hashes) == 1


def test_only_one_writes_a_block_at_a_time(cache: PrefixCache) -> None:
    hashes = chain(cache, 1)
    pending = cache.prepare(hashes, 0)
    assert pending is not None
    assert cache.prepare(hashes, 0) is None
    cache.abort(pending)
    again = cache.prepare(hashes, 0)
    assert again is not None
    again.payload[:] = payload_of(hashes[0])
    cache.commit(again)
    assert cache.prepare(hashes, 0) is None


def test_an_aborted_block_leaves_nothing(cache: PrefixCache) -> None:
    hashes = chain(cache, 2)
    pending = cache.prepare(hashes, 0)
    assert pending is not None
    pending.payload[:] = 0xFF
    cache.abort(pending)
    assert cache.lookup(hashes) == 0
    assert fill(cache, hashes) == 2
    assert read(cache, hashes) == 2


def test_committing_or_aborting_twice_is_our_bug(cache: PrefixCache) -> None:
    pending = cache.prepare(chain(cache, 1), 0)
    assert pending is not None
    cache.commit(pending)
    for again in (cache.commit, cache.abort):
        with pytest.raises(RuntimeError, match="committed or aborted before"):
            again(pending)


def test_payloads_are_writable_whole_and_aligned(cache: PrefixCache) -> None:
    hashes = chain(cache, 3)
    for index in range(3):
        pending = cache.prepare(hashes, index)
        assert pending is not None
        assert pending.payload.nbytes == FORMAT.payload_nbytes
        assert pending.payload.ctypes.data % 128 == 0
        pending.payload[:] = payload_of(hashes[index])
        cache.commit(pending)
    aligned: list[bool] = []
    lease = cache.acquire(hashes, deadline=None)
    cache.restore(
        lease, first=0, sink=lambda _, payloads: aligned.extend(p.ctypes.data % 128 == 0 for p in payloads)
    )
    lease.release()
    assert aligned == [True] * 3


def test_a_hole_ends_the_run_and_committing_again_heals_it(cache: PrefixCache) -> None:
    hashes = chain(cache, 6)
    for index in (0, 1, 3, 4, 5):
        assert write(cache, hashes, index)
    assert cache.lookup(hashes) == 2
    assert read(cache, hashes) == 2
    assert fill(cache, hashes) == 1
    assert read(cache, hashes) == 6


def test_restoring_from_the_middle(cache: PrefixCache) -> None:
    hashes = chain(cache, 5)
    fill(cache, hashes)
    lease = cache.acquire(hashes, deadline=None)
    seen: list[int] = []
    assert cache.restore(lease, first=3, sink=lambda blocks, _: seen.extend(blocks)) == 5
    assert seen == [3, 4]
    assert cache.restore(lease, first=5, sink=ignore) == 5
    lease.release()


def test_releasing_is_idempotent(cache: PrefixCache) -> None:
    fill(cache, chain(cache, 3))
    first, second = (cache.acquire(chain(cache, 3), deadline=None) for _ in range(2))
    assert first.ready
    first.release()
    first.release()
    assert cache.counters()["cache_pins"] == 3
    second.release()
    assert cache.counters()["cache_pins"] == 0
    with pytest.raises(RuntimeError, match="released"):
        cache.restore(first, first=0, sink=ignore)


def test_foreign_leases_and_reservations_are_our_bug(cache: PrefixCache, open_tier: OpenTier) -> None:
    other = open_tier(node="node-2")
    with pytest.raises(TypeError):
        cache.restore(other.acquire([], deadline=None), first=0, sink=ignore)
    with pytest.raises(TypeError):
        cache.commit(object())  # type: ignore[arg-type]


def test_what_the_sink_raises_passes_through_and_pins_nothing(cache: PrefixCache) -> None:
    hashes = chain(cache, 3)
    fill(cache, hashes)
    lease = cache.acquire(hashes, deadline=None)

    def broken(blocks: range, payloads: Sequence[npt.NDArray[np.uint8]]) -> None:
        raise OSError("engine")

    with pytest.raises(OSError, match="engine"):
        cache.restore(lease, first=0, sink=broken)
    lease.release()
    assert cache.counters()["cache_pins"] == 0
    assert read(cache, hashes) == 3


def test_pins_return_to_zero_after_1000_cycles_of_success_cancel_and_failure(open_tier: OpenTier) -> None:
    cache = open_tier(blocks=24)

    def fail(blocks: range, payloads: Sequence[npt.NDArray[np.uint8]]) -> None:
        raise ZeroDivisionError

    for cycle in range(1000):
        hashes = chain(cache, 6, seed=cycle % 9)
        lease = cache.acquire(hashes, deadline=None)
        pending = cache.prepare(hashes, lease.blocks) if lease.blocks < 6 else None
        if cycle % 3 == 0:  # success
            cache.restore(lease, first=0, sink=ignore)
        elif cycle % 3 == 1 and lease.blocks:  # the engine fails inside the restore
            with pytest.raises(ZeroDivisionError):
                cache.restore(lease, first=0, sink=fail)
        if pending is not None:
            pending.payload[:] = payload_of(hashes[lease.blocks])
            (cache.abort if cycle % 5 == 0 else cache.commit)(pending)
        lease.release()
    assert cache.counters()["cache_pins"] == 0
    wanted = chain(cache, 20, seed=99)
    for _ in range(200):  # a full cache may decline what is new to it, but not what alone keeps coming
        fill(cache, wanted)
    assert cache.lookup(wanted) == 20, "every slot can still be evicted"


def test_counters_count(open_tier: OpenTier) -> None:
    cache = open_tier(blocks=4)
    fill(cache, chain(cache, 4))
    read(cache, chain(cache, 6))
    write(cache, chain(cache, 1, seed=1), 0)
    counts = cache.counters()
    assert counts["cache_acquires_total"] == 1
    assert counts["cache_lookup_blocks_total"] == 6
    assert counts["cache_hit_blocks_total"] == counts["cache_restored_blocks_total"] == 4
    assert counts["cache_committed_blocks_total"] == 5
    assert counts["cache_evicted_blocks_total"] == 1
    assert counts["cache_resident_blocks"] == counts["cache_slots"] == 4


def test_threads_together_see_only_whole_blocks(open_tier: OpenTier) -> None:
    cache = open_tier(blocks=16)
    chains = [chain(cache, 6, seed=seed) for seed in range(6)]
    failures: list[BaseException] = []

    def work(offset: int) -> None:
        try:
            for step in range(150):
                hashes = chains[(step + offset) % 6]
                read(cache, hashes)
                fill(cache, hashes)
                cache.lookup(hashes)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert cache.counters()["cache_pins"] == 0
    assert cache.counters()["cache_corrupt_blocks_total"] == 0


def test_a_closed_cache_misses_quietly(cache: PrefixCache) -> None:
    hashes: list[BlockHash] = chain(cache, 3)
    fill(cache, hashes[:2])
    lease: Lease = cache.acquire(hashes, deadline=None)
    pending = [cache.prepare(hashes, 2), cache.prepare(chain(cache, 1, seed=1), 0)]
    cache.close()
    cache.close()
    assert cache.lookup(hashes) == 0
    assert cache.restore(lease, first=0, sink=ignore) == 0
    lease.release()
    assert pending[0] is not None
    assert pending[1] is not None
    cache.commit(pending[0])
    cache.abort(pending[1])
    assert cache.prepare(hashes, 0) is None
    assert cache.acquire(hashes, deadline=None).blocks == 0
