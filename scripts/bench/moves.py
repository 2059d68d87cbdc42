"""Rows of moves: requests that fail and blocks that are lost while vnodes move, a node joins, one drains.

Four whole nodes, with everything but an engine, and one more that is on no ring and reads all the time: a
chain of blocks that was committed twice, whole, checked byte by byte, and forgotten, so that the next read
asks the owners again. A read fails if it raises, is not ready by its deadline, brings other bytes, or brings
less than all: nothing is evicted here, so nothing may be missing.
"""

import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cachemgr import BlockFormat, BlockHash, CacheSettings, ClusterSettings, complete_secrets
from cachemgr.ring import (
    NodeSpec,
    Ring,
    RingState,
    add_node,
    drain_node,
    move_vnode,
    position_of,
)
from cachemgr.shard import slot_nbytes
from scripts.bench.cache_node import NodeOptions, OpenNode
from scripts.bench.harness import Measurement, Reading
from scripts.bench.served import free_ports
from scripts.ring.asking import Entry

FORMAT = BlockFormat(b"identity of move", "float32", layers=2, kv_heads=4, head_dim=64, block_tokens=16)
"""64 KiB a block."""

_CLUSTER = "bench-moves"
_CHAIN_BLOCKS = 32
_READ_S = 2.0
_LATE_S = 0.5
"""What a read may take beyond its deadline on a machine that is busy with the bench itself."""
_SETTLED_S = 120.0


def measurements() -> list[Measurement]:
    """All measurements of this file."""
    return [Measurement(("move.failed_requests", "move.lost_blocks"), _moves)]


def _moves() -> Iterator[Reading]:
    result = run_moves(chains=48)
    reads = f"{result.reads} reads of {_CHAIN_BLOCKS} blocks, longest {1000 * result.longest_s:.0f} ms"
    yield Reading("move.failed_requests", result.failed, f"{reads}; {result.why or 'none failed'}")
    yield Reading("move.lost_blocks", result.lost, f"{result.moved} of {result.blocks} blocks changed owners")


class MovesResult:
    """What was seen."""

    def __init__(self) -> None:
        self.reads = self.failed = self.lost = self.blocks = self.moved = 0
        self.longest_s = 0.0
        self.why = ""
        """Of the last read that failed."""


def run_moves(*, chains: int) -> MovesResult:
    """Commit so many chains, move things about under load, read everything again."""
    result = MovesResult()
    with _cluster(blocks=chains * _CHAIN_BLOCKS) as cluster:
        names = cluster.commit(chains)
        result.blocks = chains * _CHAIN_BLOCKS
        before = Ring(cluster.ring())
        with _load(cluster.reader, names, result):
            cluster.move_vnodes()
            cluster.change(lambda ring: add_node(ring, cluster.specs["node-4"]))
            cluster.wait_until(cluster.settled)
            cluster.change(lambda ring: drain_node(ring, "node-2"))
            cluster.wait_until(lambda: cluster.figure("node-2", "cluster_drained") == 1)
            cluster.wait_until(cluster.settled)
        after = Ring(cluster.ring())
        result.moved = sum(
            _owners(before, chain, at) != _owners(after, chain, at)
            for chain in names
            for at in range(_CHAIN_BLOCKS)
        )
        result.lost = sum(_CHAIN_BLOCKS - _read(cluster.reader, chain, result) for chain in names)
    return result


class _Cluster:
    """Nodes 1 to 4, of which the first three are on the ring, and a reader."""

    def __init__(self, folder: Path, stack: ExitStack, *, blocks: int) -> None:
        names = ["node-1", "node-2", "node-3", "node-4", "reader"]
        ports = free_ports(len(names))
        self.specs = {
            name: NodeSpec(name, f"127.0.0.1:{port}") for name, port in zip(names, ports, strict=True)
        }
        self._members = tuple(self.specs[name] for name in names[:3])
        self._folder = folder
        self._bytes = (blocks + 64) * slot_nbytes(FORMAT.payload_nbytes)
        complete_secrets(folder / "secrets")
        self.nodes = {name: self._open(name, stack) for name in names}
        self.reader = self.nodes["reader"]
        self._entry = Entry(self.specs["node-1"].address, _CLUSTER, 5.0)

    def commit(self, chains: int) -> list[list[BlockHash]]:
        """Chains computed by the three nodes in turn, once two nodes hold each block."""
        ids = [node.id for node in self._members]
        self.wait_until(lambda: all(self.figure(name, "cluster_peers_usable") == 2 for name in ids))
        writers = [self.nodes[name].cache for name in ids]
        made = []
        for seed in range(chains):
            tokens = np.arange(_CHAIN_BLOCKS * FORMAT.block_tokens) + 1_000_000 * seed
            hashes = writers[0].hashes(tokens, namespace="bench")
            for index in range(_CHAIN_BLOCKS):
                pending = writers[seed % 3].prepare(hashes, index)
                assert pending is not None
                _words(pending.payload)[:] = _word(hashes[index])
                writers[seed % 3].commit(pending)
            made.append(hashes)
        self.wait_until(lambda: self._total("cluster_committed2_blocks_total") == chains * _CHAIN_BLOCKS)
        return made

    def ring(self) -> RingState:
        """In force at the first node."""
        return self._entry.ring()

    def change(self, make: Callable[[RingState], RingState]) -> None:
        """As an administrator does it."""
        state = self.ring()
        reply = self._entry.propose(make(state), replaces=state.version)
        assert reply.accepted, "the ring was changed by someone else"

    def move_vnodes(self) -> None:
        """Sixteen vnodes of node 1 and of node 3 change places, one at a time."""
        for number in range(16):
            for source, target in (("node-1", "node-3"), ("node-3", "node-1")):
                vnode = f"{source}#{number}"
                self.change(partial(move_vnode, vnode=vnode, node_id=target))
        self.wait_until(self.settled)

    def settled(self) -> bool:
        """Every node of the ring has all that the ring gives it."""
        epoch = self.ring().epoch
        return all(
            self.figure(node.id, "cluster_epoch") == epoch
            and self.figure(node.id, "cluster_move_settled") == 1
            for node in self.ring().nodes
        )

    def figure(self, node: str, name: str) -> float:
        """A counter of a node."""
        return self.nodes[node].cluster.counters()["peer"].get(name, 0.0)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """TimeoutError if it does not become true."""
        deadline = time.monotonic() + _SETTLED_S
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the moves were not over within {_SETTLED_S:g} s")
            time.sleep(0.1)

    def _total(self, name: str) -> float:
        return sum(self.figure(node, name) for node in self.nodes)

    def _open(self, name: str, stack: ExitStack) -> OpenNode:
        options = NodeOptions(
            cache=CacheSettings(
                cluster=_CLUSTER, node=name, host_bytes=self._bytes, directory=str(self._folder)
            ),
            format=FORMAT,
            cluster=ClusterSettings(
                listen=self.specs[name].address,
                members=self._members,
                state_dir=str(self._folder / name),
                same_host=False,
                lookup_s=_READ_S / 2,
            ),
            secrets=str(self._folder / "secrets"),
        )
        node = OpenNode(options)
        stack.callback(node.close)
        return node


@contextmanager
def _cluster(*, blocks: int) -> Iterator[_Cluster]:
    with ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(prefix="tensorcache-bench-", dir="/dev/shm")
        yield _Cluster(Path(stack.enter_context(temporary)), stack, blocks=blocks)


@contextmanager
def _load(reader: OpenNode, chains: Sequence[list[BlockHash]], result: MovesResult) -> Iterator[None]:
    """Reads one chain after the other until the block ends."""
    ended = threading.Event()

    def read_on() -> None:
        while not ended.is_set():
            chain = chains[result.reads % len(chains)]
            result.reads += 1
            result.failed += _read(reader, chain, result) < len(chain)

    thread = threading.Thread(target=read_on, name="load")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _read(reader: OpenNode, chain: Sequence[BlockHash], result: MovesResult) -> int:
    """How many blocks of a chain come from the owners, in time and right; forgotten afterwards."""
    started = time.monotonic()
    right: list[bool] = []

    def check(blocks: range, payloads: Sequence[npt.NDArray[np.uint8]]) -> None:
        for block, payload in zip(blocks, payloads, strict=True):
            right.append(bool((_words(payload) == _word(chain[block])).all()))

    try:
        lease = reader.cache.acquire(chain, deadline=started + _READ_S)
        while not lease.ready:
            time.sleep(0.0005)
        reader.cache.restore(lease, first=0, sink=check)
        lease.release()
        reader.store.drop(chain)
    except Exception as error:  # that is what is counted here
        result.why = f"{type(error).__name__}: {error}"
        return 0
    took = time.monotonic() - started
    result.longest_s = max(result.longest_s, took)
    if took > _READ_S + _LATE_S or not all(right):
        result.why = f"took {took:.1f} s, {right.count(False)} blocks with other bytes"
        return 0
    if len(right) < len(chain):
        result.why = f"{len(chain) - len(right)} blocks missing after {took:.1f} s"
    return len(right)


def _owners(ring: Ring, chain: Sequence[BlockHash], index: int) -> tuple[str, ...]:
    return ring.owners(position_of(chain[index - index % 16]), 1 + ring.replicas)


def _words(payload: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """[N, 2]: the bytes of a block are its name, again and again."""
    return payload.view(np.uint64).reshape(-1, 2)


def _word(name: BlockHash) -> npt.NDArray[np.uint64]:
    return np.frombuffer(name, np.uint64)
