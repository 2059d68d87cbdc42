"""Membership kept in Redis: nodes give signs of life there, join by themselves, and see changes in seconds.

About once a second a node writes that it lives and reads the version of the ring, nothing more unless that
changed. Whoever starts first makes the ring of itself alone; everyone else adds itself to the ring that is
kept. Redis only brings nodes together: cut off from it, a node serves on with its last ring, and a Redis that
lost the ring, or has an older one, gets it back from the first node that notices.

Invariants
- The ring in Redis is only ever replaced by a higher one, and only by who knows what it replaces.
- A node adds itself when it starts, and when it meets a ring that has nothing in common with its own (which
  was made while Redis was empty). One that an admin removes stays removed until it is started again.

Threads: the IO loop.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from cachemgr.cluster.contract import Peers, Rings
from cachemgr.cluster.control.trouble import ControlTrouble, Trouble
from cachemgr.cluster.members.redis_ring_store import Beat, RedisRingStore
from cachemgr.cluster.members.static_members import answering_nodes
from cachemgr.cluster.rings import NO_RING
from cachemgr.errors import CacheError
from cachemgr.redis_client import RedisTrouble
from cachemgr.ring import (
    NodeId,
    NodeSpec,
    RingError,
    RingState,
    Version,
    add_node,
    first_state,
    home_of,
    vnode_count,
)

log = logging.getLogger(__name__)

_JOIN_TRIES = 12
_NAMESAKE_BEATS = 3  # one may be we ourselves, at the address before a restart


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds between looks at Redis, and between tries to reach it again: doubled from first to longest.

    `start_s`: how long a start waits for Redis before it goes on without.
    """

    start_s: float = 4.0
    look_s: float = 1.0
    first_retry_s: float = 0.25
    longest_retry_s: float = 5.0


class RedisMembers:
    """The nodes that meet in one Redis, as one of them sees them."""

    def __init__(
        self, me: NodeSpec, store: RedisRingStore, *, replicas: int, random: Random, pace: Pace | None = None
    ) -> None:
        """`me`: this node as its own settings have it; `replicas`: those of the ring, if we are the first."""
        self._me = me
        self._store = store
        self._replicas = replicas
        self._random = random
        self._pace = pace or Pace()
        self._rings: Rings | None = None
        self._peers: Peers | None = None
        self._loop: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._joining = True
        self._trouble = ""
        self._failures = 0
        self._unreached = 0
        self._namesake_beats = 0

    @property
    def trouble(self) -> str:
        """Empty, or what is wrong with Redis, and that we live on the ring we know."""
        if self._trouble and self._rings is not None:
            return f"{self._trouble}; living on ring {self._rings.ring.version.epoch}, the last one known"
        return self._trouble

    async def start(self, rings: Rings, peers: Peers) -> None:
        """Take the ring that is kept, by one read, and join it; if that fails, the one on disk or our own."""
        self._rings, self._peers = rings, peers
        try:
            async with asyncio.timeout(self._pace.start_s):
                kept = await self._store.read()
                rings.install(kept or self._alone())
                await self._look()
        except (CacheError, TimeoutError) as error:
            rings.install(self._alone())  # not where there is one, from disk or from Redis
            self._failed(error)
        self._loop = asyncio.create_task(self._keep_looking(), name="ring-redis")

    async def publish(self, state: RingState, *, replaces: Version) -> Version | None:
        """Replace the ring in Redis, then ours; ControlTrouble, for the admin to read, if that fails."""
        rings, _ = self._running()
        if rings.ring.version != replaces:
            return rings.ring.version
        if not state.version > replaces:
            raise RingError("epoch", f"must be above {replaces.epoch}, which it replaces", state.epoch)
        try:
            lost_to = await self._store.replace(replaces, state)
            winner = state if lost_to is None else await self._store.read()
        except CacheError as error:
            unheard = isinstance(error, RedisTrouble) and not error.refused
            certain = "may not have been changed" if unheard else "was not changed"
            raise ControlTrouble(Trouble.FAILED, f"{error}; the ring {certain}") from None
        if winner is not None:
            self._take(winner)
        return lost_to

    async def nodes(self) -> Mapping[NodeId, NodeSpec]:
        """Who gave a sign of life lately; while Redis cannot be asked, the nodes of the ring that answer."""
        try:
            return await self._store.nodes()
        except RedisTrouble:  # said already, or with the next look
            return answering_nodes(*self._running())

    async def close(self) -> None:
        """Stop looking, tell the others that we are gone, close the connections. Idempotent."""
        task, self._loop = self._loop, None
        self._closing.set()
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            try:
                await self._store.leave(NodeId(self._me.id))
            except RedisTrouble as error:
                log.info("%s; that we are gone is noticed when our last sign of life expires", error)
        await self._store.close()

    async def _keep_looking(self) -> None:
        # the event, too, as a cancellation may get lost: asyncio.wait_for of Python 3.11, which redis-py has,
        # swallows one that comes in the moment in which what it waits for is done
        while not self._closing.is_set():
            try:
                async with asyncio.timeout(self._pause()):
                    await self._closing.wait()
                return
            except TimeoutError:
                pass
            try:
                await self._look()
            except CacheError as error:
                self._failed(error)
            except Exception as error:  # our own bug must not end the membership of a node that serves
                log.exception("membership: a look at Redis failed")
                self._failed(error)

    async def _look(self) -> None:
        """One sign of life, and whatever the ring in Redis asks for."""
        rings, _ = self._running()
        beat = await self._store.beat(self._me)
        ours = rings.ring
        if self._joining:
            await self._join(beat.held)
        elif beat.held is None or beat.held < ours.version:
            if await self._store.replace(beat.held or NO_RING, ours.state) is None:
                was = "had no ring" if beat.held is None else f"had an older ring, {beat.held}"
                log.warning("Redis %s: it was given %s", was, ours.version)
        elif beat.held > ours.version and (kept := await self._store.read()) is not None:
            self._take(kept)
        self._judge(beat)

    def _take(self, state: RingState) -> None:
        rings, _ = self._running()
        before = {node.id for node in rings.ring.state.nodes}
        now = {node.id for node in state.nodes}
        if not rings.install(state) or self._me.id in now or self._me.id not in before:
            return
        if before & now:
            log.warning("this node is not on ring %d any more: it was removed", state.epoch)
        else:
            self._joining = True

    async def _join(self, held: Version | None) -> None:
        """Add ourselves to the ring that is kept, or bring it up to date about us. Others may do the same."""
        rings, _ = self._running()
        if held == rings.ring.version and with_node(rings.ring.state, self._me) is rings.ring.state:
            self._joining = False
            return
        for _ in range(_JOIN_TRIES):
            kept, ours = await self._store.read(), rings.ring.state
            made_up = ours.epoch == 1 and [node.id for node in ours.nodes] == [self._me.id]
            base = kept if kept is not None and (made_up or kept.version >= rings.ring.version) else ours
            wanted = with_node(base, self._me)
            replaces = NO_RING if kept is None else kept.version
            if wanted.version == replaces or await self._store.replace(replaces, wanted) is None:
                rings.install(wanted)
                self._joining = False
                log.info("%s is on ring %s", self._me.id, wanted.version)
                return
            await asyncio.sleep(self._random.uniform(0.0, 0.05))
        raise CacheError(f"the ring was changed {_JOIN_TRIES} times while {self._me.id} tried to join it")

    def _judge(self, beat: Beat) -> None:
        """Redis was there; is all well?"""
        self._namesake_beats = self._namesake_beats + 1 if beat.namesake else 0
        if beat.refusal is not None:
            raise beat.refusal
        if self._namesake_beats >= _NAMESAKE_BEATS:
            raise CacheError(f"another node calls itself {self._me.id}, too: the one at {beat.namesake}")
        if self._trouble:
            log.warning("membership: all is well again, after %d failures", self._failures)
        self._trouble, self._failures, self._unreached = "", 0, 0

    def _failed(self, error: Exception) -> None:
        begins = not self._trouble
        self._failures += 1
        self._unreached = 0 if isinstance(error, RedisTrouble) and error.refused else self._unreached + 1
        self._trouble = str(error) or f"Redis did not answer within {self._pace.start_s:g} s"
        if begins:
            log.warning("membership: %s", self.trouble)

    def _pause(self) -> float:
        longest = self._pace.look_s
        if self._unreached:
            doubled = self._pace.first_retry_s * 2.0 ** min(self._unreached - 1, 16)
            longest = min(self._pace.longest_retry_s, doubled)
        return longest * self._random.uniform(0.75, 1.25)

    def _alone(self) -> RingState:
        return first_state([self._me], replicas=self._replicas)

    def _running(self) -> tuple[Rings, Peers]:
        assert self._rings is not None
        assert self._peers is not None
        return self._rings, self._peers


def with_node(state: RingState, me: NodeSpec) -> RingState:
    """A ring that has `me` as its settings say: `state` itself if it does. Who drains goes on draining."""
    there = state.node(me.id)
    if there is None:
        return add_node(state, me)
    now = NodeSpec(me.id, me.address, me.domain, me.weight, there.draining)
    if now == there:
        return state
    vnodes = vnode_count(now.weight)
    overrides = {
        vnode: target
        for vnode, target in state.overrides.items()
        if home_of(vnode) != me.id or int(vnode.rpartition("#")[2]) < vnodes
    }
    nodes = tuple(now if node.id == me.id else node for node in state.nodes)
    return RingState(state.epoch + 1, nodes, overrides, state.replicas)
