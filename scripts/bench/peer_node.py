"""Another node of the peer rows, in a process of its own: an arena full of blocks, and a bulk server in
front of it.

    python -m scripts.bench.peer_node FOLDER NODE LAYERS BLOCKS

It says its port, then hands out a ticket (hex) for every line that comes, until the pipe closes. Started by
`started_node`, which runs in the bench.
"""

import asyncio
import hashlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cachemgr import (
    BlockFormat,
    BlockHash,
    CacheSecrets,
    CacheSettings,
    HostCache,
    complete_secrets,
    open_cache,
)
from cachemgr.cluster.bulk.opening import BulkDoor
from cachemgr.cluster.bulk.server import BulkServer
from cachemgr.cluster.bulk.tickets import Tickets
from cachemgr.cluster.contract import RingListener
from cachemgr.cluster.settings import ClusterSettings
from cachemgr.host_contract import HostStore
from cachemgr.remote import NoRemoteTiers
from cachemgr.ring import NodeId, NodeSpec, Ring, RingState, first_state
from cachemgr.shard import slot_nbytes

OWNER, READER = NodeId("owner"), NodeId("reader")
CLUSTER = "bench"
_ROOT = Path(__file__).resolve().parents[2]


def mib_format(mib: int) -> BlockFormat:
    """Blocks of so many MiB."""
    return BlockFormat(
        b"identity of peer", "float32", layers=8 * mib, kv_heads=8, head_dim=64, block_tokens=32
    )


def settings(*, same_host: bool) -> ClusterSettings:
    """Those of either node; deadlines that a busy machine keeps."""
    members = (NodeSpec(OWNER, "127.0.0.1:1"), NodeSpec(READER, "127.0.0.1:2"))
    return ClusterSettings(
        listen="127.0.0.1:1", members=members, same_host=same_host, lookup_s=5.0, call_s=10.0
    )


class BenchRings:
    """A ring that never changes."""

    def __init__(self, node: NodeId) -> None:
        self.node = node
        self.ring = Ring(first_state(settings(same_host=False).members, replicas=1))
        self.previous: Ring | None = None
        self.earlier: tuple[Ring, ...] = ()

    def install(self, state: RingState) -> bool:
        """Never: both nodes have the same."""
        return False

    def listen(self, listener: RingListener) -> None:
        """Nothing will happen."""


@dataclass(frozen=True, slots=True)
class CacheNode:
    """A cache and its store."""

    cache: HostCache
    store: HostStore

    def names(self, blocks: int) -> list[BlockHash]:
        """The same on both nodes."""
        return self.cache.hashes(np.arange(blocks * 32), namespace="bench")


@contextmanager
def opened_node(folder: Path, node: NodeId, layout: BlockFormat, *, blocks: int) -> Iterator[CacheNode]:
    """A node's cache on an arena of its own, gone at the end. Secrets lie under `folder`, for both nodes."""
    stores: list[HostStore] = []

    def keep(store: HostStore) -> NoRemoteTiers:
        stores.append(store)
        return NoRemoteTiers()

    nbytes = blocks * slot_nbytes(layout.payload_nbytes)
    name = f"{node}-{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"
    cache_settings = CacheSettings(cluster=CLUSTER, node=name, host_bytes=nbytes)
    cache = open_cache(layout, cache_settings, _secrets(folder / "secrets"), remote=keep)
    try:
        yield CacheNode(cache, stores[0])
    finally:
        cache.close()
        for arena in Path(cache_settings.directory).glob(f"tensorcache_{CLUSTER}_{name}_*.arena"):
            arena.unlink()


def _secrets(folder: Path) -> CacheSecrets:
    complete_secrets(folder)
    return CacheSecrets.load(folder)


class PeerNode:
    """The other process, as the bench sees it."""

    def __init__(self, folder: Path, *, mib: int, blocks: int) -> None:
        command = [sys.executable, "-m", __name__, str(folder), str(mib), str(blocks)]
        self._process = subprocess.Popen(
            command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.port = int(self._line())

    def door(self, *, same_host: bool) -> BulkDoor:
        """A way in."""
        assert self._process.stdin is not None
        self._process.stdin.write("ticket\n")
        self._process.stdin.flush()
        ticket = bytes.fromhex(self._line())
        return BulkDoor("127.0.0.1", self.port, ticket, same_host=same_host, tls=False)

    def close(self) -> None:
        """Let it end; kill it if it does not."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(20)
        self._process.stdout.close()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the other node ended")
        return line.strip()


def main() -> None:
    """As the module says."""
    folder, mib, blocks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    layout = mib_format(mib)
    with opened_node(folder, OWNER, layout, blocks=blocks) as node:
        names = node.names(blocks)
        numbers = np.random.default_rng(0)
        for index in range(blocks):
            pending = node.cache.prepare(names, index)
            if pending is None:
                raise RuntimeError(f"no room for block {index}")
            pending.payload[:] = numbers.integers(0, 256, layout.payload_nbytes, np.uint8)
            node.cache.commit(pending)
        asyncio.run(_serve(node))


async def _serve(node: CacheNode) -> None:
    tickets = Tickets()
    server = BulkServer(
        {node.store.format_id: node.store}.get, tickets=tickets, rings=BenchRings(OWNER),
        settings=settings(same_host=True),
    )  # fmt: skip
    print(await server.start("127.0.0.1"), flush=True)
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.readline):
        print(tickets.issue(READER).hex(), flush=True)
    await server.close()


if __name__ == "__main__":
    main()
