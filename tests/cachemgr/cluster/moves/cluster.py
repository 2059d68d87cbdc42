"""Nodes with real rings, replicators, movers and repair over doubles of stores and peers, in virtual time."""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from cachemgr.cluster.background import Background
from cachemgr.cluster.moves.handover import Handover
from cachemgr.cluster.moves.mover import Mover
from cachemgr.cluster.moves.repair import Repair
from cachemgr.cluster.moves.replicator import Replicator
from cachemgr.cluster.rings import RingsInForce
from cachemgr.cluster.settings import ClusterSettings
from cachemgr.contract import BlockHash
from cachemgr.ring import NodeId, NodeSpec, RingState, first_state, position_of
from cachemgr.shard import BlockAddress, address_of
from tests.cachemgr.cluster.moves.doubles import DirectPeer, MemoryRingFile, MemoryStore, Wire, chain
from tests.cachemgr.cluster.moves.virtual_time import clock

WEIGHT = 0.0625
"""Eight vnodes: few enough for small rings to be looked at whole."""


def spec(name: str, *, domain: str = "", draining: bool = False) -> NodeSpec:
    return NodeSpec(name, "127.0.0.1:1", domain=domain, weight=WEIGHT, draining=draining)


class Peers:
    """All nodes of the rings that a node knows."""

    def __init__(self, node: "Node", cluster: "Cluster") -> None:
        self._node = node
        self._cluster = cluster
        self._peers: dict[NodeId, DirectPeer] = {}

    def peer(self, node: NodeId) -> DirectPeer | None:
        rings = (self._node.rings.ring, *self._node.rings.earlier)
        if node == self._node.node or all(ring.state.node(node) is None for ring in rings):
            return None
        if node not in self._peers:
            self._peers[node] = DirectPeer(node, self._node, self._cluster)
        return self._peers[node]

    def others(self) -> Sequence[DirectPeer]:
        peers = [self.peer(NodeId(node.id)) for node in self._node.rings.ring.state.nodes]
        return [peer for peer in peers if peer is not None]


class Node:
    """One node. Its store and its ring file survive `kill`."""

    def __init__(self, name: str, cluster: "Cluster", *, room: int = 1 << 30) -> None:
        self.node = NodeId(name)
        self.alive = False
        self.store = MemoryStore(room=room)
        self.file = MemoryRingFile()
        self.copies: dict[BlockHash, frozenset[str]] = {}
        self._cluster = cluster

    def start(self, given: RingState | None = None) -> None:
        settings = self._cluster.settings
        self.rings = RingsInForce(
            self.node, file=self.file, previous_s=settings.previous_s, given=given, now=clock  # type: ignore[arg-type]
        )
        self.peers = Peers(self, self._cluster)
        shared = {"settings": settings, "clock": clock}
        self.replicator = Replicator(self.rings, self.peers, copies=self.copies.__setitem__, **shared)  # type: ignore[arg-type]
        self.mover = Mover(self.rings, self.peers, stores=self._stores, **shared)  # type: ignore[arg-type]
        self.handover = Handover(self.rings, self.peers, stores=self._stores, **shared)  # type: ignore[arg-type]
        self.repair = Repair(self.rings, self.peers, stores=self._stores, **shared)  # type: ignore[arg-type]
        self.alive = True
        self.probing = Background("probe", self._probe)
        if self._cluster.background:
            for part in (self.mover, self.handover, self.repair, self.probing):
                part.start()

    def commit(self, hashes: Sequence[BlockHash], index: int) -> BlockAddress:
        address = address_of(hashes, index)
        self.store.take(address)
        self.replicator.offer(self.store, hashes, index)  # type: ignore[arg-type]
        return address

    def kill(self) -> None:
        """As SIGKILL does: nothing of it runs any more, nothing is tidied up."""
        self.alive = False
        self.store.pins.clear()
        for task in self._tasks():
            task.cancel()

    def backgrounds(self) -> list[Background]:
        return [self.probing, *(part._background for part in (self.mover, self.handover, self.repair))]

    async def _probe(self) -> float:
        """As real peers do: whoever is silent is asked now and then."""
        for peer in self.peers.others():
            await peer.exchange_ring(deadline=clock() + 1)
        return 4.0

    def _stores(self) -> list[MemoryStore]:
        return [self.store]

    def _tasks(self) -> Iterable[asyncio.Task[None]]:
        lanes = self.replicator._lanes.values()
        for task in [part._task for part in (*self.backgrounds(), *lanes)]:
            if task is not None:
                yield task


class Cluster:
    """Starts with `names`, all there and empty; `specs` gives others than `spec(name)`.

    Without `background` there are replicators only.
    """

    def __init__(
        self,
        names: str,
        *,
        replicas: int = 1,
        specs: Callable[[str], NodeSpec] = spec,
        background: bool = True,
        **settings: object,
    ) -> None:
        self.background = background
        self.settings = ClusterSettings(**settings)  # type: ignore[arg-type]
        self.wire = Wire()
        self.nodes: dict[NodeId, Node] = {}
        self.state = first_state([specs(name) for name in names], replicas=replicas)
        self.committed: list[BlockAddress] = []
        for name in names:
            self.add(name)

    def add(self, name: str, *, room: int = 1 << 30) -> Node:
        """A node that runs; being in the ring is another matter."""
        node = self.nodes[NodeId(name)] = Node(name, self, room=room)
        node.start(self.state)
        return node

    def __getitem__(self, name: str) -> Node:
        return self.nodes[NodeId(name)]

    def install(self, state: RingState) -> None:
        """A change of the ring, which every node that lives hears of at once."""
        self.state = state
        for node in self.nodes.values():
            if node.alive:
                node.rings.install(state)

    def commit(self, seed: int, blocks: int = 4, *, at: str = "") -> list[BlockAddress]:
        """A prompt is computed `at` a node, by default the primary of its segment."""
        hashes = chain(seed, blocks)
        ring = next(node for node in self.nodes.values() if node.alive).rings.ring
        node = self[at or ring.owners(position_of(hashes[0]), 1)[0]]
        made = [node.commit(hashes, index) for index in range(blocks)]
        self.committed += made
        return made

    async def fill(self, prompts: int = 12, blocks: int = 4) -> None:
        """Commit, and wait until everything is where it belongs."""
        for seed in range(prompts):
            self.commit(seed, blocks)
        await self.until(lambda: all(node.replicator.idle for node in self.live()))

    def live(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.alive]

    def owners(self, address: BlockAddress) -> list[Node]:
        ring = self.live()[0].rings.ring
        return [self.nodes[node] for node in ring.owners(position_of(address.segment), 1 + ring.replicas)]

    def holders(self, address: BlockAddress) -> set[str]:
        return {str(node.node) for node in self.nodes.values() if address.hash in node.store.blocks}

    def placed(self) -> bool:
        """Every owner has what it owns."""
        return all(
            address.hash in owner.store.blocks for address in self.committed for owner in self.owners(address)
        )

    def only_owners_hold(self) -> bool:
        return all(
            self.holders(address) == {str(owner.node) for owner in self.owners(address)}
            for address in self.committed
        )

    def readable(self, address: BlockAddress) -> bool:
        """True if every live node finds it with an owner by its ring in force, or by the one before."""
        for reader in self.live():
            rings = reader.rings
            asked = [
                node
                for ring in (rings.ring, *rings.earlier)
                for node in ring.owners(position_of(address.segment), 1 + ring.replicas)
            ]
            if not any(self.nodes[n].alive and address.hash in self.nodes[n].store.blocks for n in asked):
                return False
        return True

    async def until(
        self, condition: Callable[[], object], *, limit_s: float = 900.0, look_s: float = 0.1
    ) -> None:
        """Let virtual time pass until it holds; AssertionError if it does not within `limit_s`."""
        deadline = clock() + limit_s
        while not condition():
            assert clock() < deadline, "it did not become true"
            await asyncio.sleep(look_s)

    async def close(self) -> None:
        failures = 0
        for node in self.nodes.values():
            failures += sum(background.failures for background in node.backgrounds())
            if node.alive:
                for part in (node.replicator, node.mover, node.handover, node.repair, node.probing):
                    await part.close()
                assert not any(node.store.pins.values()), f"{node.node} leaves blocks pinned"
        assert not failures, "something raised in the background"


