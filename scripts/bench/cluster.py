"""Rows of the cluster that need an engine: what a prompt of another node costs, and what peers wait for."""

import secrets
import shutil
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from backend.access import DEFAULT_NAMESPACE
from backend.settings import ModelSettings
from cachemgr import BlockFormat, CacheSecrets, CacheSettings, ClusterSettings
from cachemgr.ring import NodeSpec
from scripts.bench.cache import block_format, ttft
from scripts.bench.cache_node import NodeOptions, NodeProcess, OpenNode, node_processes
from scripts.bench.decoder import Decoder, decoder
from scripts.bench.harness import Measurement, Paired, Reading, alternate
from scripts.bench.served import free_ports
from scripts.bench.subject import Subject

CLUSTER = "bench"
_HOST_BYTES = 1 << 30
_TOKENS = 1024
_PROMPTS, _WARMUPS = 5, 3  # after which the connections to all owners are there
_COPIED_S = 60.0
_CONTEND_S = 15.0

Prompt = npt.NDArray[np.int64]


def measurements(subject: Subject) -> list[Measurement]:
    """All measurements of this file."""
    rows = ("cluster.ttft1024.peer_vs_compute", "cluster.ttft1024.three_owners_vs_one")
    return [
        Measurement(rows, partial(_other_node, subject)),
        Measurement(("cluster.index_lock_p99_us",), partial(_index_lock, subject)),
    ]


class _Cluster:
    """A ring that gives everything to `owners`; those of `asking` are members and own nothing."""

    def __init__(
        self, folder: Path, layout: BlockFormat, *, owners: Sequence[str], asking: Sequence[str]
    ) -> None:
        self._name = f"{CLUSTER}-{secrets.token_hex(4)}"
        self._folder = folder / self._name
        self._layout = layout
        ports = free_ports(len(owners) + len(asking))
        self._members = tuple(
            NodeSpec(id=name, address=f"127.0.0.1:{port}", draining=name in asking)
            for name, port in zip((*owners, *asking), ports, strict=True)
        )
        CacheSecrets.generate(self._folder / "secrets")

    def options(self, name: str) -> NodeOptions:
        """What the member of that name is opened with; blocks travel over TCP, as between machines.

        `lookup_s` as in `make cluster`: all nodes share the processors of one machine.
        """
        (member,) = (member for member in self._members if member.id == name)
        return NodeOptions(
            CacheSettings(cluster=self._name, node=name, host_bytes=_HOST_BYTES),
            self._layout,
            ClusterSettings(
                listen=member.address, members=self._members, replicas=0, same_host=False, lookup_s=0.5,
                state_dir=str(self._folder / name),
            ),
            str(self._folder / "secrets"),
        )  # fmt: skip

    def remove(self) -> None:
        """Delete what it left."""
        shutil.rmtree(self._folder)
        for arena in Path(CacheSettings().directory).glob(f"tensorcache_{self._name}_*.arena"):
            arena.unlink()


@contextmanager
def _cluster(
    subject: Subject, layout: BlockFormat, *, owners: Sequence[str], asking: Sequence[str]
) -> Iterator[_Cluster]:
    cluster = _Cluster(subject.settings.folder, layout, owners=owners, asking=asking)
    try:
        yield cluster
    finally:
        cluster.remove()


@contextmanager
def _asking(subject: Subject, options: NodeOptions) -> Iterator[tuple[Decoder, OpenNode]]:
    """A decoder on this node: engine, step loop and cache are the real ones."""
    settings = ModelSettings(lane_ttl_s=0.0)
    node = OpenNode(options)
    try:
        with (
            subject.engine(lanes=8, max_seq_len=4096) as engine,
            decoder(engine, node.cache, release=subject.release(), settings=settings) as asked,
        ):
            yield asked, node
    finally:
        node.close()


def _layout(subject: Subject) -> BlockFormat:
    with subject.engine(lanes=1, max_seq_len=2048) as engine:
        return block_format(engine.spec)


def _other_node(subject: Subject) -> Iterator[Reading]:
    """The same prompts in two clusters: one where one node owns all of them, one where three share them.

    Of two engines in one process the one that was opened last is slower by half, whatever it is asked (why is
    not known): so all is done twice, and each cluster is the last one once.
    """
    layout = _layout(subject)
    computed: list[float] = []
    of_one: list[float] = []
    ratios: list[float] = []
    for last in (3, 1):
        paired = _beside_each_other(subject, layout, computed, last=last)
        one, three = (paired.b, paired.a) if last == 3 else (paired.a, paired.b)
        of_one += one
        ratios.append(statistics.median(x / y for x, y in zip(three, one, strict=True)))
    seconds, compute = statistics.median(of_one), statistics.median(computed)
    subject.ttft_s["peer"] = seconds
    yield Reading(
        "cluster.ttft1024.peer_vs_compute",
        seconds / compute,
        f"{1e3 * seconds:.0f} ms against {1e3 * compute:.0f} ms, over TCP, {len(of_one)} prompts",
    )
    yield Reading(
        "cluster.ttft1024.three_owners_vs_one",
        statistics.geometric_mean(ratios),
        f"{ratios[0]:.2f} with three owners opened last, {ratios[1]:.2f} first; {len(of_one)} pairs",
    )


def _beside_each_other(
    subject: Subject, layout: BlockFormat, computed: list[float], *, last: int
) -> Paired:
    """Times to a first token in the cluster opened last, and in the other; `computed` gets those without."""
    prompts = [subject.prompt(_TOKENS) for _ in range(_PROMPTS + _WARMUPS)]
    clusters = (["one"], ["one", "two", "three"])
    with ExitStack() as opened:
        asked = []
        for owners in clusters if last == 3 else clusters[::-1]:
            cluster = opened.enter_context(
                _cluster(subject, layout, owners=owners, asking=("writer", "reader"))
            )
            holding = opened.enter_context(node_processes([cluster.options(owner) for owner in owners]))
            computed += _write(subject, cluster.options("writer"), prompts, holding)
            asked.append(opened.enter_context(_asking(subject, cluster.options("reader")))[0])
        of_last, of_first = iter(prompts), iter(prompts)
        return alternate(
            lambda: ttft(asked[1], next(of_last), cached=True),
            lambda: ttft(asked[0], next(of_first), cached=True),
            rounds=_PROMPTS,
            warmups=_WARMUPS,
        )


def _write(
    subject: Subject, options: NodeOptions, prompts: Sequence[Prompt], holding: Sequence[NodeProcess]
) -> list[float]:
    """Compute the prompts and wait until the owners have them; seconds to each first token."""
    with _asking(subject, options) as (asked, _):
        seconds = [ttft(asked, prompt, cached=False) for prompt in prompts]
        wanted, limit = len(prompts) * (_TOKENS // 32), time.monotonic() + _COPIED_S
        while (found := sum(process.blocks for process in holding)) < wanted:
            if time.monotonic() > limit:
                raise RuntimeError(f"{found} of {wanted} blocks reached their owners in {_COPIED_S:.0f} s")
            time.sleep(0.05)
    return seconds


class _TimedLock:
    """Stands in for the index's lock, and notes how long the IO thread waits for it."""

    def __init__(self, lock: Any, waits: list[float]) -> None:
        self._lock = lock
        self._waits = waits

    def __enter__(self) -> None:
        if threading.current_thread().name != "cache-io":
            self._lock.acquire()
            return
        started = time.perf_counter()
        self._lock.acquire()
        self._waits.append(time.perf_counter() - started)

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _index_lock(subject: Subject) -> Iterator[Reading]:
    """A node computes prompts without a pause, while another one reads blocks from it."""
    waits: list[float] = []
    with (
        _cluster(subject, _layout(subject), owners=("computing",), asking=("reading",)) as cluster,
        _asking(subject, cluster.options("computing")) as (asked, node),
        node_processes([cluster.options("reading")]) as (reading,),
    ):
        prompt = subject.prompt(_TOKENS)
        ttft(asked, prompt, cached=False)
        state = node.cache._tier.table._state  # what is measured has no other door
        state.lock = _TimedLock(state.lock, waits)  # type: ignore[assignment]
        reading.keep_reading(node.cache.hashes(prompt, namespace=DEFAULT_NAMESPACE))
        computed, until = 0, time.monotonic() + _CONTEND_S
        while time.monotonic() < until:
            ttft(asked, subject.prompt(_TOKENS), cached=False)
            computed += 1
    p50, p99 = (1e6 * float(np.percentile(waits, q)) for q in (50, 99))
    detail = f"median {p50:.1f} µs, {len(waits)} times, {computed} prompts of {_TOKENS} tokens meanwhile"
    yield Reading("cluster.index_lock_p99_us", p99, detail)
