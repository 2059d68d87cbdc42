"""Rows of the cache: what a hit saves, what it costs to restore, and how its index grows."""

import secrets
import shutil
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from backend.settings import ModelSettings
from cachemgr import BlockFormat, BlockHash, CacheSecrets, CacheSettings, HostCache, open_cache
from cachemgr.arena import Arena, open_locked
from cachemgr.counts import Counts
from cachemgr.slot_table import SlotTable
from engines import EngineSpec, LaneId
from scripts.bench.decoder import Decoder, decoder
from scripts.bench.harness import Measurement, Reading, alternate, median_of, timed
from scripts.bench.peers import open_peer
from scripts.bench.subject import Subject

CLUSTER = "bench"
_CHAINS = 98
_CHAIN = 1024
_INDEXED = 1_000_000
_SMALL_SLOT_NBYTES = 384
_SMALL = BlockFormat(
    kv_identity=b"small blocks    ", dtype="float32", layers=1, kv_heads=1, head_dim=1, block_tokens=32
)
"""Slots of 384 bytes, so that 100,000 of them fit any machine; the index does not see the difference."""


def measurements(subject: Subject) -> list[Measurement]:
    """All measurements of this room."""
    small = ("cache.lookup1024_ms", "cache.reattach100k_ms")
    return [
        Measurement(("cache.ttft1024.host_vs_compute",), partial(_host_hit, subject)),
        Measurement(("cache.ttft2048.hit_vs_openvino_hit",), partial(_openvino_hit, subject)),
        Measurement(("cache.restore.vs_memcpy",), partial(_restore, subject)),
        Measurement(("cache.hash32k_ms",), partial(_hash, subject)),
        Measurement(small, partial(_many_resident, subject)),
        Measurement(("cache.index_bytes_per_block",), _index_bytes),
    ]


@contextmanager
def opened_cache(
    home: Path, layout: BlockFormat, *, host_bytes: int
) -> Iterator[tuple[HostCache, CacheSettings, CacheSecrets]]:
    """A cache in shared memory under names of its own, gone at the end; its secrets lie under `home`."""
    folder = home / f"secrets-{secrets.token_hex(4)}"
    node = f"bench-{secrets.token_hex(4)}"
    settings = CacheSettings(cluster=CLUSTER, node=node, host_bytes=host_bytes)
    keys = CacheSecrets.generate(folder)
    cache = open_cache(layout, settings, keys)
    try:
        yield cache, settings, keys
    finally:
        cache.close()
        shutil.rmtree(folder)
        for arena in _arenas(settings):
            arena.unlink()


def _arenas(settings: CacheSettings) -> list[Path]:
    return sorted(Path(settings.directory).glob(f"tensorcache_{settings.cluster}_{settings.node}_*.arena"))


def block_format(spec: EngineSpec) -> BlockFormat:
    """How blocks of an engine lie in a cache."""
    g = spec.geometry
    return BlockFormat(
        kv_identity=spec.kv_identity,
        dtype=str(spec.kv_dtype),
        layers=g.layers,
        kv_heads=g.kv_heads,
        head_dim=g.head_dim,
        block_tokens=spec.block_tokens,
    )


@contextmanager
def cached_decoder(subject: Subject, *, lane_ttl_s: float) -> Iterator[Decoder]:
    """The real engine and the real cache behind the real step loop."""
    settings = ModelSettings(lane_ttl_s=lane_ttl_s)
    with (
        subject.engine(lanes=8, max_seq_len=4096) as engine,
        opened_cache(subject.settings.folder, block_format(engine.spec), host_bytes=1 << 30) as (cache, _, _),
        decoder(engine, cache, release=subject.release(), settings=settings) as asked,
    ):
        yield asked


def ttft(asked: Decoder, prompt: npt.NDArray[np.int64], *, cached: bool) -> float:
    """Seconds to the first token; RuntimeError unless the prompt was (or was not) in the cache."""
    heard = asked.ask(prompt, max_tokens=1).wait()
    if cached != (heard.cached_tokens >= len(prompt) - 32):
        raise RuntimeError(f"{heard.cached_tokens} of {len(prompt)} tokens came from the cache")
    return heard.ttft_s


def _host_hit(subject: Subject) -> Iterator[Reading]:
    with cached_decoder(subject, lane_ttl_s=0.0) as asked:
        prompt = subject.prompt(1024)

        def computed() -> float:
            nonlocal prompt
            prompt = subject.prompt(1024)
            return ttft(asked, prompt, cached=False)

        def restored() -> float:
            return ttft(asked, prompt, cached=True)

        paired = alternate(computed, restored, rounds=7)
    compute, host = (1e3 * seconds for seconds in paired.medians)
    detail = f"{host:.1f} ms against {compute:.0f} ms, host tier alone, {len(paired.a)} pairs"
    yield Reading("cache.ttft1024.host_vs_compute", 1 / paired.ratio, detail)


def _openvino_hit(subject: Subject) -> Iterator[Reading]:
    prompt = subject.prompt(2048)
    with open_peer("openvino", subject.peers) as peer, cached_decoder(subject, lane_ttl_s=30.0) as asked:
        peer.seconds("prefill", prompt, variant="PA")
        ttft(asked, prompt, cached=False)
        paired = alternate(
            lambda: ttft(asked, prompt, cached=True),
            lambda: peer.seconds("prefill", prompt, variant="PA"),
            rounds=15,
            warmups=2,
        )
    ours, theirs = (1e3 * seconds for seconds in paired.medians)
    detail = f"{ours:.1f} ms against {theirs:.1f} ms, a prompt seen before, default settings"
    yield Reading("cache.ttft2048.hit_vs_openvino_hit", paired.ratio, detail)


def _restore(subject: Subject) -> Iterator[Reading]:
    blocks = 2048 // 32
    with (
        subject.engine(lanes=2, max_seq_len=2176) as engine,
        opened_cache(subject.settings.folder, block_format(engine.spec), host_bytes=256 << 20) as (
            cache,
            _,
            _,
        ),
    ):
        hashes = cache.hashes(subject.prompt(2048), namespace="bench")
        payload = np.random.default_rng(0).normal(size=(engine.spec.block_nbytes // 4,)).astype(np.float32)
        fill(cache, hashes, payload.view(np.uint8))
        lease = cache.acquire(hashes, deadline=None)

        def restore() -> float:
            started = time.perf_counter()
            usable = cache.restore(lease, first=0, sink=partial(engine.import_blocks, LaneId(0)))
            seconds = time.perf_counter() - started
            if usable != blocks:
                raise RuntimeError(f"{usable} of {blocks} blocks were restored")
            return nbytes / seconds / 1e9

        nbytes = blocks * engine.spec.block_nbytes
        source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
        paired = alternate(
            restore, lambda: nbytes / timed(lambda: np.copyto(target, source)) / 1e9, rounds=9, warmups=2
        )
        lease.release()
    ours, memcpy = paired.medians
    detail = f"{ours:.2f} GB/s with tags checked against {memcpy:.2f} GB/s, {nbytes >> 20} MiB"
    yield Reading("cache.restore.vs_memcpy", paired.ratio, detail)


def fill(cache: HostCache, hashes: list[BlockHash], payload: npt.NDArray[np.uint8]) -> None:
    """Commit a block of `payload` under every hash."""
    for index in range(len(hashes)):
        pending = cache.prepare(hashes, index)
        if pending is None:
            raise RuntimeError(f"no room for block {index}")
        pending.payload[:] = payload
        cache.commit(pending)


def _hash(subject: Subject) -> Iterator[Reading]:
    tokens = subject.corpus[: 32 * 1024]
    with opened_cache(subject.settings.folder, _SMALL, host_bytes=1 << 20) as (cache, _, _):
        seconds = median_of(
            lambda: timed(lambda: cache.hashes(tokens, namespace="bench")), rounds=21, warmups=3
        )
        blocks = len(cache.hashes(tokens, namespace="bench"))
    yield Reading("cache.hash32k_ms", 1e3 * seconds, f"{len(tokens)} tokens, {blocks} blocks, median of 21")


def _many_resident(subject: Subject) -> Iterator[Reading]:
    payload = np.zeros(_SMALL.payload_nbytes, np.uint8)
    with opened_cache(subject.settings.folder, _SMALL, host_bytes=_CHAINS * _CHAIN * _SMALL_SLOT_NBYTES) as (
        cache,
        settings,
        keys,
    ):
        chains = []
        for number in range(_CHAINS):
            tokens = np.arange(number, number + _CHAIN * 32, dtype=np.int64)
            chains.append(cache.hashes(tokens, namespace="bench"))
            fill(cache, chains[-1], payload)
        resident = int(cache.counters()["cache_resident_blocks"])
        turn = iter(range(1_000_000))

        def lookup() -> float:
            chain = chains[next(turn) % len(chains)]
            return timed(lambda: _expect(cache.lookup(chain), _CHAIN))

        seconds = median_of(lookup, rounds=31, warmups=3)
        yield Reading("cache.lookup1024_ms", 1e3 * seconds, f"{resident} blocks resident, median of 31")
        cache.close()
        yield _reattach(settings, keys, resident)


def _reattach(settings: CacheSettings, keys: CacheSecrets, resident: int) -> Reading:
    """Opening the cache on the arena that another one left, less the time of reading its headers alone."""

    def attach() -> float:
        started = time.perf_counter()
        cache = open_cache(_SMALL, settings, keys)
        seconds = time.perf_counter() - started
        found = int(cache.counters()["cache_resident_blocks"])
        cache.close()
        _expect(found, resident)
        return seconds

    paired = alternate(attach, partial(_header_seconds, _arenas(settings)[0]), rounds=5)
    whole, headers = (1e3 * seconds for seconds in paired.medians)
    detail = f"{whole:.0f} ms to open with {resident} blocks, less {headers:.0f} ms for reading the headers"
    return Reading("cache.reattach100k_ms", whole - headers, detail)


def _header_seconds(path: Path) -> float:
    """Seconds to map the arena file and copy every header."""
    started = time.perf_counter()
    descriptor = open_locked(str(path))
    if descriptor is None:
        raise RuntimeError(f"{path} is locked")
    arena = Arena(descriptor, path=str(path), block_format=_SMALL, first_slot=0)
    arena.headers()
    seconds = time.perf_counter() - started
    arena.close()
    return seconds


def _expect(found: int, wanted: int) -> None:
    if found != wanted:
        raise RuntimeError(f"expected {wanted} blocks, found {found}")


def _index_bytes() -> Iterator[Reading]:
    """All that index and eviction order keep for a million blocks; numpy reports to tracemalloc too."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        table = SlotTable(
            _INDEXED, ttl_s=3600.0, erase=lambda slot: None, clock=time.monotonic, counts=Counts()
        )
        for start in range(0, _INDEXED, 10_000):
            names = [BlockHash(number.to_bytes(16, "little")) for number in range(start, start + 10_000)]
            slots = np.arange(start, start + 10_000, dtype=np.int32)
            table.add_resident(names, slots, np.zeros(10_000, np.uint32))
        del names, slots
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    _expect(int(table.gauges()["cache_resident_blocks"]), _INDEXED)
    yield Reading(
        "cache.index_bytes_per_block", (after - before) / _INDEXED, f"{_INDEXED} blocks, tracemalloc"
    )
