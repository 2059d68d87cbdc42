"""All other nodes of the rings in force: made when a ring names them, let go when none does any more.

Every `settings.breaker_s` / 5 the peers are looked at: those that are down are probed as soon as their
breakers let us, so that no request has to; so are those that nothing was heard of for `breaker_s`, longest
unheard first. That is how a node hears that another is down, back, or has a newer ring, though it never asks
it for anything.

Invariants
- A peer whose node left, or has another address now, takes no new calls; it is closed once the last one ends.
- At most `PROBES` probes run at once, one per peer.

Threads: the IO thread.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from cachemgr.cluster.background import Background
from cachemgr.cluster.control.messages import MemberStatus
from cachemgr.cluster.control.peer import ConnectedPeer
from cachemgr.cluster.rings import RingsInForce
from cachemgr.cluster.settings import ClusterSettings
from cachemgr.ring import NodeId, Ring

PROBES = 16
_LOOKS = 5
"""Looks at the peers per breaker_s."""

MakePeer = Callable[[NodeId, str], ConnectedPeer]
"""A peer for a node at an address, not connected yet."""

_log = logging.getLogger(__name__)


class ConnectedPeers:
    """Implements `Peers`."""

    def __init__(
        self,
        *,
        rings: RingsInForce,
        make: MakePeer,
        settings: ClusterSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """On the running loop. Follows `rings` from now on; `start` begins to look after them."""
        self._rings = rings
        self._make = make
        self._settings = settings
        self._clock = clock
        self._peers: dict[NodeId, ConnectedPeer] = {}
        self._others: tuple[ConnectedPeer, ...] = ()
        self._leaving: set[asyncio.Task[None]] = set()
        self._probing: dict[NodeId, asyncio.Task[bool]] = {}
        self._past: Counter[str] = Counter()
        self._background = Background("peers", self._look)
        self._closed = False
        self._follow()
        rings.listen(self._changed)

    def start(self) -> None:
        """Begin to probe."""
        self._background.start()

    def peer(self, node: NodeId) -> ConnectedPeer | None:
        """None for ourselves and for nodes that no ring knows."""
        return self._peers.get(node)

    def others(self) -> Sequence[ConnectedPeer]:
        """Everyone of the ring in force but us."""
        return self._others

    def drained(self, node: NodeId) -> None:
        """That node says that it leaves."""
        peer = self._peers.get(node)
        if peer is not None:
            peer.drained()

    def heard(self, node: NodeId) -> None:
        """That node began to talk to us, as it does when it has started: no need to wait for its breaker."""
        peer = self._peers.get(node)
        if peer is not None and not peer.usable:
            peer.hurry()
            self._background.wake()

    def status(self) -> list[MemberStatus]:
        """All peers, by id."""
        return [peer.status for _, peer in sorted(self._peers.items())]

    def counters(self) -> dict[str, float]:
        """Totals (`…_total`) of all peers together, those that left included, and how many are usable."""
        totals = Counter(self._past)
        for peer in self._peers.values():
            totals.update(_totals(peer))
        counts = {f"cluster_peer_{what}_total": float(count) for what, count in totals.items()}
        counts["cluster_peers"] = float(len(self._others))
        counts["cluster_peers_usable"] = float(sum(peer.usable for peer in self._others))
        return counts

    async def say_drain(self) -> None:
        """Tell everyone who can be reached that we leave."""
        deadline = self._clock() + self._settings.call_s
        await asyncio.gather(*(peer.say_drain(deadline=deadline) for peer in self._others))

    async def close(self) -> None:
        """Close them all, with what runs. Idempotent."""
        self._closed = True
        await self._background.close()
        tasks = [*self._probing.values(), *self._leaving]
        for task in self._probing.values():
            task.cancel()
        for peer in self._peers.values():
            self._let_go(peer, grace_s=0.0)
        self._peers, self._others = {}, ()
        await asyncio.gather(*tasks, *self._leaving, return_exceptions=True)

    def _changed(self, ring: Ring, previous: Ring | None) -> None:
        if not self._closed:
            self._follow()

    def _follow(self) -> None:
        """Have the peers that the rings name. Where they differ in an address, the newer ring is right."""
        if not self._rings.known:
            return
        ring, us = self._rings.ring, self._rings.node
        addresses: dict[NodeId, str] = {}
        for named in (*reversed(self._rings.earlier), ring):
            addresses.update({NodeId(node.id): node.address for node in named.state.nodes if node.id != us})
        for node, peer in list(self._peers.items()):
            if addresses.get(node) != peer.address:
                del self._peers[node]
                self._let_go(peer, grace_s=self._settings.call_s)
        for node, address in addresses.items():
            if node not in self._peers:
                self._peers[node] = self._make(node, address)
        self._others = tuple(self._peers[NodeId(node.id)] for node in ring.state.nodes if node.id != us)

    def _let_go(self, peer: ConnectedPeer, *, grace_s: float) -> None:
        self._past.update(_totals(peer))
        peer.retire()
        task = asyncio.create_task(peer.close(grace_s), name=f"close-{peer.node}")
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        task.add_done_callback(_tell_failure)

    async def _look(self) -> float:
        self._follow()  # a ring before may have run out
        due = [peer for node, peer in self._peers.items() if node not in self._probing and peer.probe_due]
        due.sort(key=lambda peer: peer.heard_at)
        for peer in due[: PROBES - len(self._probing)]:
            self._probe(peer)
        return self._settings.breaker_s / _LOOKS

    def _probe(self, peer: ConnectedPeer) -> None:
        task = asyncio.create_task(peer.probe(), name=f"probe-{peer.node}")
        self._probing[peer.node] = task
        task.add_done_callback(lambda _: self._probing.pop(peer.node, None))
        task.add_done_callback(_tell_failure)


def _totals(peer: ConnectedPeer) -> dict[str, int]:
    troubles = {f"trouble_{kind}": count for kind, count in peer.troubles.items()}
    return {**troubles, "breaker_opened": peer.opened}


def _tell_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("%s failed", task.get_name(), exc_info=error)
