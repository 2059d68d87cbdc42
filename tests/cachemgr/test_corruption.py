"""Slots that are corrupt, truncated, foreign or stale: a miss, removed, counted, and never wrong bytes."""

import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cachemgr import BlockFormat, CacheSecrets
from cachemgr.shard import HEADER_DTYPE, HEADER_NBYTES, slot_nbytes
from tests.cachemgr.host import FORMAT, SECRETS, Host, chain, fill, payload_of, read, write
from tests.cachemgr.peer_process import PEER_FORMAT, Peer, fill_peer

STRIDE = slot_nbytes(FORMAT.payload_nbytes)
OTHER_KEY = CacheSecrets(SECRETS.naming, {2: bytes(32)})
BOTH_KEYS = CacheSecrets(SECRETS.naming, {1: SECRETS.tags[1], 2: bytes(32)})


def slots_of(path: Path) -> np.ndarray:
    """The arena file as rows of slots, written straight to the file."""
    return np.memmap(path, np.uint8, "r+").reshape(-1, STRIDE)


def row_of(path: Path, name: bytes) -> int:
    headers = slots_of(path)[:, :HEADER_NBYTES].copy().view(HEADER_DTYPE)[:, 0]
    return next(row for row, header in enumerate(headers) if bytes(header["hash"]) == name)


@pytest.mark.parametrize("offset", [0, 4, 8, 13, 16, 18, 24, 32, 48, 64, 80, 88, 96, 112, 128, 200, 383])
@pytest.mark.parametrize("reopened", [False, True], ids=["live", "re-attached"])
def test_a_flipped_byte_anywhere_is_a_miss_and_heals(host: Host, offset: int, reopened: bool) -> None:
    cache = host.open()
    hashes = chain(cache, 5)
    fill(cache, hashes)
    (path,) = host.arenas()
    if reopened:
        cache.close()
    slots_of(path)[row_of(path, hashes[2]), offset] ^= 0x40
    if reopened:
        cache = host.open()
    assert read(cache, hashes) == 2
    counts = cache.counters()
    assert counts["cache_corrupt_blocks_total"] + counts["cache_unreadable_blocks_total"] <= 1
    if not (
        reopened and offset in (8, 32)
    ):  # without its magic a slot is just empty, with another name just another
        assert counts["cache_corrupt_blocks_total"] + counts["cache_unreadable_blocks_total"] == 1
    assert cache.lookup(hashes) == 2, "removed"
    assert counts["cache_pins"] == 0
    assert fill(cache, hashes) == 1
    assert read(cache, hashes) == 5
    if offset not in (8, 32):
        cache.check_integrity()


def test_a_removed_block_stays_removed_after_a_restart(host: Host) -> None:
    cache = host.open()
    hashes = chain(cache, 3)
    fill(cache, hashes)
    (path,) = host.arenas()
    row = row_of(path, hashes[1])
    slots_of(path)[row, HEADER_NBYTES] ^= 1
    assert read(cache, hashes) == 1
    slots_of(path)[row, HEADER_NBYTES] ^= 1
    cache.close()
    assert host.open().lookup(hashes) == 1


def test_an_expired_block_stays_gone_after_a_restart(host: Host) -> None:
    cache = host.open(ttl_s=10.0)
    hashes = chain(cache, 3)
    fill(cache, hashes)
    host.clock.now += 10
    cache.acquire([], deadline=None).release()  # every request sweeps
    cache.close()
    assert host.open(ttl_s=10.0).lookup(hashes) == 0


def test_a_slot_is_unpublished_before_it_is_written(host: Host) -> None:
    """Even one that somebody else published behind our back."""
    cache = host.open(blocks=1)
    slots = slots_of(host.arenas()[0])
    fill(cache, chain(cache, 1))
    published = slots.copy()
    host.clock.now += 3600
    cache.acquire([], deadline=None).release()
    slots[:] = published
    pending = cache.prepare(chain(cache, 1, seed=1), 0)
    assert pending is not None
    assert slots[0, 8:12].tobytes() == bytes(4)


def test_a_foreign_block_under_our_name_is_a_miss(host: Host) -> None:
    cache = host.open()
    hashes = chain(cache, 4)
    fill(cache, hashes)
    slots = slots_of(host.arenas()[0])
    slots[row_of(host.arenas()[0], hashes[2])] = slots[row_of(host.arenas()[0], hashes[1])]
    assert read(cache, hashes) == 2
    assert cache.counters()["cache_corrupt_blocks_total"] == 1


def test_a_block_of_another_kv_identity_is_a_miss(host: Host) -> None:
    """Only a forger can bring another identity under our name: names depend on it."""
    other_format = BlockFormat(b"another identity", *[getattr(FORMAT, f) for f in FORMAT.__slots__[1:]])
    cache = host.open()
    hashes = chain(cache, 2)
    other = host.open(block_format=other_format, node="node-2")
    for index in range(2):
        assert write(cache, hashes, index)
        assert write(other, hashes, index)
    ours, theirs = host.arenas()
    slots_of(ours)[row_of(ours, hashes[1])] = slots_of(theirs)[row_of(theirs, hashes[1])]
    assert read(cache, hashes) == 1
    assert cache.counters()["cache_corrupt_blocks_total"] == 1


def test_other_identities_of_one_geometry_keep_their_blocks(host: Host) -> None:
    """A roll-back to the engine before finds its blocks, as long as nothing had to make room."""
    newer_format = BlockFormat(b"another identity", *[getattr(FORMAT, f) for f in FORMAT.__slots__[1:]])
    cache = host.open()
    hashes = chain(cache, 3)
    fill(cache, hashes)
    cache.close()
    newer = host.open(block_format=newer_format)
    renamed = newer.hashes(np.arange(12), namespace="org")
    assert newer.lookup(renamed) == 0
    fill(newer, renamed)
    newer.close()
    assert read(host.open(), hashes) == 3


def test_a_stale_slot_is_a_miss(host: Host) -> None:
    cache = host.open()
    hashes = chain(cache, 2)
    fill(cache, hashes)
    (path,) = host.arenas()
    before = slots_of(path).copy()
    cache.close()
    slots_of(path)[:] = 0
    cache = host.open()
    fill(cache, chain(cache, 2, seed=1))
    slots_of(path)[:] = before  # what was there a while ago, whole and rightly tagged, but under other names
    assert read(cache, chain(cache, 2, seed=1)) == 0
    assert cache.counters()["cache_corrupt_blocks_total"] == 2
    assert read(cache, hashes) == 0


def test_a_shard_of_an_unknown_key_is_a_miss_but_stays(host: Host) -> None:
    cache = host.open()
    hashes = chain(cache, 3)
    fill(cache, hashes)
    cache.close()
    other = host.open(secrets=OTHER_KEY)
    assert read(other, hashes) == 0
    assert other.counters()["cache_unreadable_blocks_total"] == 3
    assert other.counters()["cache_corrupt_blocks_total"] == 0
    assert fill(other, hashes[:1]) == 1, "a block may be written again beside it"
    other.close()
    again = host.open(secrets=BOTH_KEYS)
    assert read(again, hashes) == 3


def test_unreadable_shards_make_room_first(host: Host) -> None:
    cache = host.open(blocks=4)
    fill(cache, chain(cache, 3))
    cache.close()
    other = host.open(blocks=4, secrets=OTHER_KEY)
    hashes = chain(other, 4, seed=1)
    assert fill(other, hashes) == 4
    assert read(other, hashes) == 4
    other.check_integrity()


def test_a_live_slot_that_turns_unreadable_is_kept(host: Host) -> None:
    cache = host.open()
    hashes = chain(cache, 2)
    fill(cache, hashes)
    (path,) = host.arenas()
    row = row_of(path, hashes[1])
    slots_of(path)[row, 12] = 9  # a version from the future
    assert read(cache, hashes) == 1
    assert cache.counters()["cache_unreadable_blocks_total"] == 1
    assert slots_of(path)[row, 8:12].tobytes() == b"TCKV"
    assert fill(cache, hashes) == 1
    assert read(cache, hashes) == 2
    assert cache.counters()["cache_pins"] == 0


def test_a_corrupt_block_under_two_readers_is_counted_once(host: Host) -> None:
    cache = host.open(blocks=2)
    hashes = chain(cache, 2)
    fill(cache, hashes)
    leases = [cache.acquire(hashes, deadline=None) for _ in range(2)]
    slots_of(host.arenas()[0])[row_of(host.arenas()[0], hashes[1]), 300] ^= 1
    for lease in leases:
        assert cache.restore(lease, first=0, sink=lambda *_: None) == 1
        assert cache.prepare(hashes, 1) is None, "its slot is not free before the last reader left"
    assert cache.counters()["cache_corrupt_blocks_total"] == 1
    for lease in leases:
        lease.release()
    cache.check_integrity()
    assert write(cache, hashes, 1)
    assert read(cache, hashes) == 2


def test_a_file_truncated_while_closed_keeps_what_is_left(host: Host) -> None:
    cache = host.open(blocks=8)
    hashes = chain(cache, 8)
    fill(cache, hashes)
    cache.close()
    (path,) = host.arenas()
    lost = next(index for index in range(8) if row_of(path, hashes[index]) == 7)
    with path.open("r+b") as file:
        file.truncate(7 * STRIDE + 100)
    cache = host.open(blocks=8)
    assert read(cache, hashes) == lost
    other = chain(cache, 7, seed=1)
    assert fill(cache, other) == 7
    assert read(cache, other) == 7


def test_a_file_truncated_while_open_costs_hits_and_nothing_else(host: Host) -> None:
    cache = host.open(blocks=8)
    hashes = chain(cache, 8)
    fill(cache, hashes[:6])
    pending = cache.prepare(hashes, 6)
    with host.arenas()[0].open("r+b") as file:
        file.truncate(STRIDE)
    assert pending is not None
    cache.commit(pending)
    assert read(cache, hashes) == 0
    assert cache.prepare(hashes, 7) is None
    assert cache.counters()["cache_pins"] == 0


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    noise=st.lists(
        st.tuples(st.integers(0, 8 * STRIDE - 1), st.binary(min_size=1, max_size=64)), min_size=1, max_size=6
    ),
    reopened=st.booleans(),
)
def test_any_writing_into_the_file_costs_hits_and_nothing_else(
    host: Host, noise: list[tuple[int, bytes]], reopened: bool
) -> None:
    cache = host.open(blocks=8)
    hashes = chain(cache, 7)
    fill(cache, hashes)
    (path,) = host.arenas()
    if reopened:
        cache.close()
    with path.open("r+b") as file:
        for offset, data in noise:
            file.seek(offset)
            file.write(data[: 8 * STRIDE - offset])
    if reopened:
        cache = host.open(blocks=8)
    for _ in range(1 + reopened):  # a slot found empty at the start ends the first lease before what is bad
        read(cache, hashes)  # checks every byte that comes back, and removes all that is bad of its lease
        fill(cache, hashes)
    assert read(cache, hashes) == 7
    assert cache.counters()["cache_pins"] == 0
    cache.close()


@pytest.mark.parametrize("blocks", [9, 40, 700], ids=["one batch", "batches of one", "batches"])
def test_one_request_heals_every_bad_block_of_its_chain(host: Host, blocks: int) -> None:
    shape = PEER_FORMAT if blocks == 40 else FORMAT
    cache = host.open(blocks=blocks, block_format=shape)
    prompts = [chain(cache, blocks // 3, seed=seed) for seed in range(3)]
    for seed in range(3):
        assert fill_peer(cache, blocks // 3, seed=seed, block_format=shape) == blocks // 3
    (path,) = host.arenas()
    np.memmap(path, np.uint8, "r+")[:] = 0
    assert [read(cache, hashes) for hashes in prompts] == [0, 0, 0]
    assert cache.counters()["cache_corrupt_blocks_total"] == 3 * (blocks // 3)
    assert cache.counters()["cache_resident_blocks"] == 0
    for seed in range(3):
        assert fill_peer(cache, blocks // 3, seed=seed, block_format=shape) == blocks // 3
    for hashes in prompts:
        lease = cache.acquire(hashes, deadline=None)
        assert cache.restore(lease, first=0, sink=lambda *_: None) == blocks // 3
        lease.release()
    assert cache.counters()["cache_corrupt_blocks_total"] == 3 * (blocks // 3)
    cache.check_integrity()


def test_good_blocks_behind_a_bad_one_stay(host: Host) -> None:
    cache = host.open(blocks=12)
    hashes = chain(cache, 12)
    fill(cache, hashes)
    (path,) = host.arenas()
    for index in (3, 7, 11):
        slots_of(path)[row_of(path, hashes[index]), 300] ^= 1
    handed: list[int] = []
    lease = cache.acquire(hashes, deadline=None)
    assert cache.restore(lease, first=0, sink=lambda blocks, _: handed.extend(blocks)) == 3
    lease.release()
    assert handed == [0, 1, 2], "what follows a bad block never reaches the engine"
    assert cache.counters()["cache_corrupt_blocks_total"] == 3
    assert cache.counters()["cache_restored_blocks_total"] == 3
    cache.check_integrity()
    assert fill(cache, hashes) == 3
    assert read(cache, hashes) == 12
    cache.check_integrity()


def test_only_private_copies_reach_the_engine(host: Host) -> None:
    """A slot rewritten while the engine imports it: the engine still sees what was checked."""
    cache = host.open()
    hashes = chain(cache, 3)
    fill(cache, hashes)
    slots = slots_of(host.arenas()[0])
    seen: list[bytes] = []

    def scribble_then_import(blocks: range, payloads: Sequence[np.ndarray]) -> None:
        slots[:] = 0xFF
        seen.extend(payload.tobytes() for payload in payloads)

    lease = cache.acquire(hashes, deadline=None)
    assert cache.restore(lease, first=0, sink=scribble_then_import) == 3
    lease.release()
    assert seen == [payload_of(name).tobytes() for name in hashes]


def test_a_truncation_under_a_working_process_costs_at_most_that_process(
    host: Host, start_peer: Callable[..., Peer]
) -> None:
    """It may hit the one store or copy that runs at that moment: SIGBUS. Nothing else may come of it."""
    peer = start_peer(blocks=16)
    peer.ask("churn", 4, 12)
    (path,) = host.arenas()
    nbytes = path.stat().st_size
    with path.open("r+b") as file:  # not by name: the process replaces a file that it finds cut
        for _ in range(200):
            file.truncate(0)
            file.truncate(nbytes)
    assert peer.exit_code() in (None, -signal.SIGBUS)
    peer.kill()
    cache = host.open(blocks=16, block_format=PEER_FORMAT)
    assert fill_peer(cache, 12, seed=7) == 12
    assert cache.lookup(chain(cache, 12, seed=7)) == 12
    assert path.stat().st_blocks * 512 >= path.stat().st_size == nbytes
    cache.check_integrity()


def test_a_corrupt_arena_is_said_once(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    cache = host.open()
    for _ in range(3):
        fill(cache, chain(cache, 1))
        slots_of(host.arenas()[0])[:, 300] ^= 1
        assert read(cache, chain(cache, 1)) == 0
    assert cache.counters()["cache_corrupt_blocks_total"] == 3
    assert caplog.text.count("block removed from use") == 1
