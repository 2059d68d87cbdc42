"""Two models of different geometry on one node: who gets room, who gives way, who stays warm."""

import numpy as np
import pytest

from cachemgr import BlockFormat, CacheSettings, HostCache, open_cache
from cachemgr.shard import slot_nbytes
from tests.cachemgr.host import FORMAT, SECRETS, Host, chain, fill

STRIDE = slot_nbytes(FORMAT.payload_nbytes)
WIDER = BlockFormat(FORMAT.kv_identity, "float32", layers=3, kv_heads=1, head_dim=4, block_tokens=4)


def slots(cache: HostCache) -> int:
    return int(cache.counters()["cache_slots"])


def test_unlocked_arenas_of_another_geometry_or_layout_go_when_their_room_is_needed(host: Host) -> None:
    host.open().close()
    (old,) = host.arenas()
    future = old.with_name(old.name.replace("_v1_", "_v9_"))
    future.write_bytes(bytes(STRIDE))
    future.chmod(0o600)
    bystanders = [old.with_name(name) for name in (old.name.replace("node-1", "node-2"), "other.arena")]
    for path in bystanders:
        path.write_bytes(b"")
        path.chmod(0o600)
    wider = host.open(block_format=WIDER)
    assert slots(wider) == 64
    assert not old.exists()
    assert not future.exists()
    assert all(path.exists() for path in bystanders)


def test_two_models_stay_warm_whatever_the_order_they_restart_in(host: Host) -> None:
    nbytes = 64 * STRIDE
    wide_blocks = nbytes // slot_nbytes(WIDER.payload_nbytes)
    for first_format in (FORMAT, WIDER):
        plain = host.open(arena_bytes=nbytes // 2)
        wider = host.open(blocks=wide_blocks, block_format=WIDER)
        hashes = chain(plain, 5)
        wide_hashes = wider.hashes(np.arange(20), namespace="org")
        fill(plain, hashes)
        for index in range(5):
            pending = wider.prepare(wide_hashes, index)
            if pending is not None:
                wider.commit(pending)
        plain.close()
        wider.close()
        if first_format is FORMAT:
            plain, wider = host.open(), host.open(blocks=wide_blocks, block_format=WIDER)
        else:
            wider, plain = host.open(blocks=wide_blocks, block_format=WIDER), host.open()
        assert plain.lookup(hashes) == 5
        assert wider.lookup(wide_hashes) == 5
        assert sum(path.stat().st_size for path in host.arenas()) <= nbytes
        plain.close()
        wider.close()


def test_by_default_a_second_model_finds_room(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachemgr.arena_files.default_bound", lambda *_, held: 64 * STRIDE)
    settings = CacheSettings(directory=str(host.directory))
    caches = [open_cache(block_format, settings, SECRETS) for block_format in (FORMAT, WIDER)]
    assert slots(caches[0]) == 32
    assert slots(caches[1]) == 32 * STRIDE // slot_nbytes(WIDER.payload_nbytes) > 0
    for cache in caches:
        cache.close()


@pytest.mark.parametrize("left", [0, 1])
def test_a_second_model_without_room_says_once_what_to_set(
    host: Host, caplog: pytest.LogCaptureFixture, left: int
) -> None:
    first = host.open()
    wide_blocks = 64 * STRIDE // slot_nbytes(WIDER.payload_nbytes) + left
    assert not caplog.records
    second = host.open(blocks=wide_blocks, block_format=WIDER)
    for _ in range(3):
        second._refresh_arenas()
    assert (slots(first), slots(second)) == (64, left)
    (said,) = caplog.messages
    assert said.startswith("host tier waits: ")
    bound = wide_blocks * slot_nbytes(WIDER.payload_nbytes)
    assert said.endswith(f"set arena_bytes to what each may hold (for two: {bound // 2})")
    first.close()
    second.close()
    caplog.clear()
    advised = bound // 2  # is it good advice?
    first = host.open(blocks=bound // STRIDE, arena_bytes=advised)
    second = host.open(blocks=wide_blocks, block_format=WIDER, arena_bytes=advised)
    assert slots(first) == advised // STRIDE
    assert slots(second) > 20
    assert not caplog.records


def test_a_locked_arena_of_another_geometry_stays_and_counts(host: Host) -> None:
    nbytes = 64 * STRIDE
    cache = host.open(arena_bytes=nbytes // 2)
    other = host.open(blocks=nbytes // slot_nbytes(WIDER.payload_nbytes), block_format=WIDER)
    assert slots(cache) == 32
    assert slots(other) > 0
    assert sum(path.stat().st_size for path in host.arenas()) <= nbytes
    assert fill(cache, chain(cache, 5)) == 5
