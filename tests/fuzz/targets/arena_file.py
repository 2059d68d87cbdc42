"""An arena file full of anything, taken over or read beside its writer: misses, and what is whole."""

import fcntl
import functools
import os

from cachemgr.arena_files import geometry_digest
from cachemgr.shard import VERSION, slot_nbytes
from tests.cachemgr.host import FORMAT, Host, chain, fill, read
from tests.fuzz.contract import scratch
from tests.fuzz.source import Source

_SLOTS = 4
_STRIDE = slot_nbytes(FORMAT.payload_nbytes)


@functools.cache
def _whole() -> bytes:
    """The file of a cache that holds one chain of four."""
    folder = scratch() / "whole-arena"
    folder.mkdir()
    host = Host(folder)
    cache = host.open(blocks=_SLOTS)
    fill(cache, chain(cache, _SLOTS))
    host.close()
    return host.arenas()[0].read_bytes()


EXAMPLES = (
    b"\x00" + _whole(), b"\x01" + _whole(), b"\x00" + _whole()[:_STRIDE] * 4, b"\x01" + bytes(_STRIDE * 2),
    b"\x00" + _whole()[:-100], b"\x01" + _whole()[:200],
)  # fmt: skip


def target(data: bytes) -> None:
    source = Source(data)
    beside, content = source.byte() & 1, source.rest()
    folder = scratch() / "fuzzed-arena"
    folder.mkdir(exist_ok=True)
    for left in folder.iterdir():
        left.unlink()
    path = folder / f"tensorcache_local_node-1_v{VERSION}_{geometry_digest(FORMAT)}_0.arena"
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.write(fd, content)
    if beside:
        fcntl.flock(fd, fcntl.LOCK_EX)  # whoever wrote it lives
    host = Host(folder)
    try:
        cache = host.open(blocks=16)
        names = chain(cache, _SLOTS)
        known = cache.lookup(names)
        usable = read(cache, names)  # every byte of what comes back is compared
        assert usable <= known
        counts = cache.counters()
        assert counts["cache_pins"] == 0
        if content == _whole():
            assert usable == _SLOTS, "whole blocks were lost"
        rounds = 0
        while usable < _SLOTS:  # a wrong block behind a missing one is looked at when that is there again
            fill(cache, names)
            usable = read(cache, names)
            rounds += 1
            assert rounds <= _SLOTS, "it does not heal"
        cache.check_integrity()
    finally:
        host.close()
        os.close(fd)
