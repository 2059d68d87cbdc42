"""Whole nodes on loopback, in this process: caches, and everything between them."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cachemgr import BlockHash, CacheSettings, ClusterSettings, HostCache, open_cache
from cachemgr.joining import open_beyond
from cachemgr.ring import NodeSpec
from cachemgr.shard import slot_nbytes
from tests.cachemgr.cluster.certificates import Authority
from tests.cachemgr.host import FORMAT, SECRETS, payload_of
from tests.free_ports import free_ports
from tests.waiting import wait_until

BLOCKS = 256


class Node:
    """One node: `cache` is what an engine would use."""

    def __init__(self, spec: NodeSpec, folder: Path, arenas: Path, **options: Any) -> None:
        self.spec = spec
        blocks = options.pop("blocks", BLOCKS)
        slow = {"lookup_s": 5.0, "call_s": 5.0, "breaker_s": 0.2, **options}
        self.settings = ClusterSettings(listen=spec.address, state_dir=str(folder / spec.id), **slow)
        self.cache_settings = CacheSettings(
            cluster="test",
            node=spec.id,
            host_bytes=blocks * slot_nbytes(FORMAT.payload_nbytes),
            directory=str(arenas),
        )
        self.open()

    def open(self) -> None:
        self.copies: dict[BlockHash, frozenset[str]] = {}
        self.cluster = open_beyond(self.cache_settings, self.settings, copies=self._copied)
        self.cache: HostCache = open_cache(FORMAT, self.cache_settings, SECRETS, remote=self.cluster.tiers)

    def _copied(self, name: BlockHash, domains: frozenset[str]) -> None:
        self.copies[name] = domains

    def committed(self, names: Sequence[BlockHash]) -> int:
        """In how many failure domains all of them are."""
        return min(len(self.copies.get(name, ())) for name in names)

    def close(self) -> None:
        self.cache.close()
        self.cluster.close()


@contextmanager
def nodes(
    folder: Path, arenas: Path, count: int = 3, *, authority: Authority | None = None, **options: Any
) -> Iterator[list[Node]]:
    """`authority`: they have certificates of it, in files called after them."""
    specs = [
        NodeSpec(id=f"n{number}", address=f"127.0.0.1:{port}")
        for number, port in enumerate(free_ports(count), 1)
    ]
    opened: list[Node] = []
    try:
        for spec in specs:
            tls = asdict(authority.issue(spec.id, as_files=spec.id)) if authority is not None else {}
            opened.append(Node(spec, folder, arenas, members=tuple(specs), **tls, **options))
        yield opened
    finally:
        for node in opened:
            node.close()


def read_within(node: Node, names: Sequence[BlockHash], *, limit_s: float = 20.0) -> int:
    """Restore a chain, wherever it is, and check every byte; how many blocks came back."""
    lease = node.cache.acquire(names, deadline=time.monotonic() + limit_s)
    wait_until(lambda: lease.ready, limit_s=limit_s + 5)
    wrong: list[int] = []

    def sink(blocks: range, payloads: Sequence[Any]) -> None:
        for block, payload in zip(blocks, payloads, strict=True):
            if payload.tobytes() != payload_of(names[block]).tobytes():
                wrong.append(block)

    usable = node.cache.restore(lease, first=0, sink=sink)
    lease.release()
    assert not wrong
    return usable
