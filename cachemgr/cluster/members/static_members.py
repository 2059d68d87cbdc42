"""Membership by a list in the settings: it seeds the first ring, and nodes tell each other of later ones.

A change is installed here and pushed to everyone who can be reached; of two at once the higher version wins
everywhere, and the other one is told so by whoever had it first. Who was away gets the newest ring when it
starts, with the first message it exchanges, or from a node picked at random every few seconds.

No majority is asked: while the network is split, each half may change its ring, and one of the two changes is
undone when the halves meet. Misses are all that costs, as nothing read depends on the ring.

Threads: the IO loop.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from random import Random

from cachemgr.cluster.contract import Peer, Peers, Rings
from cachemgr.ring import NodeId, NodeSpec, RingError, RingState, Version, first_state

log = logging.getLogger(__name__)


class StaticMembers:
    """The nodes of a list, as one of them sees them."""

    def __init__(
        self,
        me: NodeSpec,
        members: Sequence[NodeSpec],
        *,
        replicas: int,
        call_s: float = 2.0,
        gossip_s: float = 3.0,
        random: Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`me`: this node as its own settings have it; `replicas`: those of the first ring.

        `call_s`: the deadline of every exchange; `gossip_s`: seconds between two of them, on average.
        """
        self._me = me
        self._first = first_state(members, replicas=replicas)
        self._call_s = call_s
        self._gossip_s = gossip_s
        self._random = random
        self._clock = clock
        self._rings: Rings | None = None
        self._peers: Peers | None = None
        self._gossip: asyncio.Task[None] | None = None
        self._closing = False

    @property
    def trouble(self) -> str:
        """Empty, or why this node has no part in the cluster, or knows no more than it did."""
        if self._rings is None or self._peers is None:
            return ""
        here, others = self._rings.ring.state.node(self._me.id), self._peers.others()
        if here is None:
            return f"{self._me.id} is not on the ring: {self._how_to_join()}"
        if here.address != self._me.address:
            return (
                f"the ring has {self._me.id} at {here.address}, but it is at {self._me.address}: "
                f"`tensorcache ring remove {self._me.id}`, then {self._how_to_join()}"
            )
        if others and all(peer.down_since is not None for peer in others):
            return f"none of the {len(others)} other nodes answers"
        return ""

    async def start(self, rings: Rings, peers: Peers) -> None:
        """Install the list's ring unless a higher one is known, and ask all others once for theirs."""
        self._rings, self._peers = rings, peers
        if not rings.install(self._first) and rings.ring.state.nodes != self._first.nodes:
            log.info(
                "ring %d, kept from before, goes before the list of members, which differs",
                rings.ring.version.epoch,
            )
        await self._exchange(peers.others())
        if rings.ring.state.node(self._me.id) is None:
            log.warning("%s", self.trouble)
        self._gossip = asyncio.create_task(self._keep_exchanging(), name="ring-gossip")
        self._gossip.add_done_callback(_tell_end)

    async def publish(self, state: RingState, *, replaces: Version) -> Version | None:
        """Install here, push to all; the higher version if anyone came back with one."""
        rings, peers = self._running()
        before = rings.ring
        if before.version != replaces:  # from here to `install` nothing awaits: of two calls here one gets in
            return before.version
        if not state.version > replaces or not rings.install(state):
            raise RingError("epoch", f"must be above {replaces.epoch}, which it replaces", state.epoch)
        known = {NodeId(node.id) for ring in (state, before.state) for node in ring.nodes}  # removed, too
        found = [peer for node in sorted(known) if (peer := peers.peer(node)) is not None]
        answers = await self._exchange(found)
        silent = [peer.node for peer, answer in zip(found, answers, strict=True) if answer is None]
        if silent:
            log.warning("ring %d: not yet known to %s", state.epoch, ", ".join(silent))
        highest = max([rings.ring.version, *(answer for answer in answers if answer is not None)])
        return highest if highest > state.version else None

    async def nodes(self) -> Mapping[NodeId, NodeSpec]:
        """Nodes of the ring that are not known to be down."""
        return answering_nodes(*self._running())

    async def close(self) -> None:
        """Stop asking. Idempotent."""
        task, self._gossip = self._gossip, None
        self._closing = True
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)  # what it ended with was logged

    async def _keep_exchanging(self) -> None:
        while not self._closing:  # should a cancellation get lost in what is awaited
            await asyncio.sleep(self._gossip_s * self._random.uniform(0.5, 1.5))
            others = self._running()[1].others()
            if others:
                await self._exchange([self._random.choice(others)])

    async def _exchange(self, peers: Sequence[Peer]) -> list[Version | None]:
        deadline = self._clock() + self._call_s
        return await asyncio.gather(*(peer.exchange_ring(deadline=deadline) for peer in peers))

    def _running(self) -> tuple[Rings, Peers]:
        assert self._rings is not None
        assert self._peers is not None
        return self._rings, self._peers

    def _how_to_join(self) -> str:
        return f"`tensorcache ring add {self._me.id} --address {self._me.address}` puts it there"


def answering_nodes(rings: Rings, peers: Peers) -> dict[NodeId, NodeSpec]:
    """Nodes of the ring in force that are not known to be down; ourselves if we are on it."""
    down = {peer.node for peer in peers.others() if peer.down_since is not None}
    return {NodeId(node.id): node for node in rings.ring.state.nodes if node.id not in down}


def _tell_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("this node no longer asks others for newer rings", exc_info=error)
