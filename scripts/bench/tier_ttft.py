"""Rows of prompts whose blocks are in a lower tier only: engine, step loop and cache are the real ones.

Each prompt is computed, which is timed; once the tier has its blocks the host tier lets go of them, and the
prompt is asked for again. In the last row a proxy holds up every block by 20 ms on its way from Redis: there
it counts that a prompt takes hardly longer than computing it, wherever its blocks come from.
"""

import secrets
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from backend.access import DEFAULT_NAMESPACE
from backend.settings import ModelSettings
from cachemgr import (
    BlockFormat,
    CacheSecrets,
    CacheSettings,
    HostCache,
    LmdbTierSettings,
    RedisTierSettings,
    RemoteTiers,
    open_cache,
)
from cachemgr.host_contract import HostStore
from cachemgr.joining import open_beyond
from cachemgr.tiers.beyond import OpenedBeyond
from scripts.bench.cache import CLUSTER, block_format, cached_decoder, ttft
from scripts.bench.decoder import Decoder, decoder
from scripts.bench.harness import Measurement, Reading, alternate, median_of
from scripts.bench.redis_server import redis_server
from scripts.bench.slow_proxy import slowed
from scripts.bench.subject import Subject

_TOKENS = 1024
_BLOCKS = _TOKENS // 32
_PAIRS = 7
_HOST_BYTES = 1 << 30
_LMDB_BYTES = 2 << 30
_KEPT_S = 30.0
_LOOK_S = 0.02
_SLOW_S = 0.020

Prompt = npt.NDArray[np.int64]


def measurements(subject: Subject) -> list[Measurement]:
    """All measurements of this file."""
    redis, lmdb = "cache.ttft1024.redis_vs_compute", "cache.ttft1024.lmdb_vs_compute"
    slow = "cache.slow_redis_ttft_vs_compute"
    return [
        Measurement((redis,), partial(_from_redis, redis, subject)),
        Measurement((lmdb,), partial(_from_lmdb, lmdb, subject)),
        Measurement((slow,), partial(_from_slow_redis, slow, subject)),
    ]


@dataclass(frozen=True, slots=True)
class _Lower:
    """The one tier below: `name` is its label."""

    name: str
    redis: RedisTierSettings | None = None
    lmdb: LmdbTierSettings | None = None


class _Asked:
    """A decoder whose cache has one tier below the host tier."""

    def __init__(self, subject: Subject, asked: Decoder, node: "_Node", lower: _Lower) -> None:
        self._subject = subject
        self._asked = asked
        self._node = node
        self._lower = lower
        self._wanted = 0
        self._prompt = subject.prompt(_TOKENS)
        self.cached_tokens: list[int] = []
        """Of each prompt that was below only."""

    def computed(self) -> float:
        """Seconds to the first token of a prompt that nobody has seen."""
        self._prompt = self._subject.prompt(_TOKENS)
        return ttft(self._asked, self._prompt, cached=False)

    def below_only(self) -> float:
        """Seconds to the first token of the same prompt, once only the tier below has its blocks."""
        self._wanted += _BLOCKS
        self._node.wait_for_kept(self._lower.name, self._wanted)
        self._node.empty(self._prompt)
        heard = self._asked.ask(self._prompt, max_tokens=1).wait()
        self.cached_tokens.append(heard.cached_tokens)
        return heard.ttft_s

    def here(self) -> float:
        """Seconds to the first token of the same prompt, whose blocks are in the host tier."""
        return ttft(self._asked, self._prompt, cached=True)


class _Node:
    """A cache with what is beyond it."""

    def __init__(self, cache: HostCache, store: HostStore, beyond: OpenedBeyond) -> None:
        self.cache = cache
        self._store = store
        self._beyond = beyond

    def wait_for_kept(self, tier: str, blocks: int) -> None:
        """Until the tier has kept so many since it was opened."""
        limit = time.monotonic() + _KEPT_S
        while (kept := self._beyond.counters().get(tier, {}).get("tier_put_blocks_total", 0)) < blocks:
            if time.monotonic() > limit:
                raise RuntimeError(f"{tier} kept {kept:.0f} of {blocks} blocks in {_KEPT_S:.0f} s")
            time.sleep(_LOOK_S)

    def empty(self, prompt: Prompt) -> None:
        """The host tier has nothing of this prompt any more."""
        names = self.cache.hashes(prompt, namespace=DEFAULT_NAMESPACE)
        self._store.drop(names)
        if len(self._store.missing(names)) != len(names):
            raise RuntimeError("the host tier kept a block")


@contextmanager
def _opened_node(home: Path, layout: BlockFormat, lower: _Lower) -> Iterator[_Node]:
    """Under names of its own; arena and secrets are gone at the end."""
    stores: list[HostStore] = []
    settings = CacheSettings(cluster=CLUSTER, node=f"bench-{secrets.token_hex(4)}", host_bytes=_HOST_BYTES)

    def keep(store: HostStore) -> RemoteTiers:
        stores.append(store)
        return beyond.tiers(store)

    with tempfile.TemporaryDirectory(dir=home) as folder, ExitStack() as closing:
        closing.callback(_remove_arenas, settings)
        beyond = open_beyond(settings, redis=lower.redis, lmdb=lower.lmdb)
        closing.callback(beyond.close)
        cache = open_cache(layout, settings, CacheSecrets.generate(Path(folder) / "secrets"), remote=keep)
        closing.callback(cache.close)
        yield _Node(cache, stores[0], beyond)


def _remove_arenas(settings: CacheSettings) -> None:
    for arena in Path(settings.directory).glob(f"tensorcache_{settings.cluster}_{settings.node}_*.arena"):
        arena.unlink()


@contextmanager
def _over(subject: Subject, lower: _Lower) -> Iterator[_Asked]:
    settings = ModelSettings(lane_ttl_s=0.0)
    with (
        subject.engine(lanes=8, max_seq_len=4096) as engine,
        _opened_node(subject.settings.folder, block_format(engine.spec), lower) as node,
        decoder(engine, node.cache, release=subject.release(), settings=settings) as asked,
    ):
        yield _Asked(subject, asked, node, lower)


def _from_redis(row: str, subject: Subject) -> Iterator[Reading]:
    with redis_server() as port, _over(subject, _in_redis(port)) as asked:
        yield _beside_compute(row, "redis", asked, subject)
        subject.ttft_s["host"] = median_of(asked.here, rounds=_PAIRS)
    with cached_decoder(subject, lane_ttl_s=30.0) as retaining:
        prompt = subject.prompt(_TOKENS)
        ttft(retaining, prompt, cached=False)
        subject.ttft_s["lane"] = median_of(lambda: ttft(retaining, prompt, cached=True), rounds=_PAIRS)


def _from_lmdb(row: str, subject: Subject) -> Iterator[Reading]:
    with tempfile.TemporaryDirectory(dir=subject.settings.folder) as folder:
        settings = LmdbTierSettings(path=folder, max_bytes=_LMDB_BYTES)
        with _over(subject, _Lower("lmdb", lmdb=settings)) as asked:
            yield _beside_compute(row, "lmdb", asked, subject)


def _from_slow_redis(row: str, subject: Subject) -> Iterator[Reading]:
    """Without warming up: the first one, when nothing is known of the tier yet, counts as any other."""
    with (
        redis_server() as port,
        slowed(port, value_s=_SLOW_S) as slow_port,
        _over(subject, _in_redis(slow_port)) as asked,
    ):
        paired = alternate(asked.computed, asked.below_only, rounds=_PAIRS, warmups=0)
    ratios = [below / compute for compute, below in zip(paired.a, paired.b, strict=True)]
    compute, below = paired.medians
    subject.ttft_s[f"redis, {1e3 * _SLOW_S:.0f} ms a block"] = below
    came = statistics.median(tokens // 32 for tokens in asked.cached_tokens)
    detail = (
        f"{1e3 * below:.0f} ms against {1e3 * compute:.0f} ms; first {ratios[0]:.2f}, "
        f"worst {max(ratios):.2f} of {_PAIRS} pairs, {came:.0f} of {_BLOCKS} blocks came"
    )
    yield Reading(row, statistics.median(ratios), detail)


def _in_redis(port: int) -> _Lower:
    return _Lower("redis", redis=RedisTierSettings(url=f"redis://127.0.0.1:{port}", admit_seen=1))


def _beside_compute(row: str, name: str, asked: _Asked, subject: Subject) -> Reading:
    paired = alternate(asked.computed, asked.below_only, rounds=_PAIRS, warmups=2)
    whole = sum(tokens >= _TOKENS - 32 for tokens in asked.cached_tokens[-_PAIRS:])
    if not whole:
        raise RuntimeError(f"of {_TOKENS} tokens so many came from {name}: {asked.cached_tokens}")
    compute, below = paired.medians
    subject.ttft_s["compute"], subject.ttft_s[name] = compute, below
    detail = (
        f"{1e3 * below:.1f} ms against {1e3 * compute:.0f} ms, blocks in {name} alone, "
        f"{whole} of {_PAIRS} prompts came whole"
    )
    return Reading(row, 1 / paired.ratio, detail)
