"""A node that dies at any moment of a move: no block is lost, and after its restart the move is done.

A moment is just before a call reaches the other node, or just before its answer comes back. Every test first
counts the moments of an undisturbed move, then kills at each of some of them.
"""

import asyncio
from collections.abc import Callable

import pytest

from cachemgr.ring import RingState, add_node, drain_node, move_vnode, position_of
from tests.cachemgr.cluster.moves.cluster import Cluster, spec
from tests.cachemgr.cluster.moves.doubles import MemoryStore
from tests.cachemgr.cluster.moves.virtual_time import clock, run


def _vnode(cluster: Cluster) -> str:
    ring = cluster.live()[0].rings.ring
    at = (ring.vnode_at(position_of(address.segment)) for address in cluster.committed)
    return next(str(vnode) for vnode, _, owner in at if owner == "a")


MOVES: dict[str, tuple[Callable[[Cluster], RingState], str, str]] = {
    "join": (lambda cluster: add_node(cluster.state, spec("d")), "a", "d"),
    "drain": (lambda cluster: drain_node(cluster.state, "a"), "a", "b"),
    "vnode": (lambda cluster: move_vnode(cluster.state, _vnode(cluster), "c"), "a", "c"),
}
"""Name → the change, a node that gives, a node that takes."""


async def _settled(cluster: Cluster) -> None:
    await cluster.until(lambda: all(node.mover.settled for node in cluster.live()), limit_s=60, look_s=1.0)
    await cluster.until(cluster.only_owners_hold, limit_s=200, look_s=2.0)


async def _begin(move: str) -> Cluster:
    cluster = Cluster("abc")
    cluster.add("d")
    await cluster.fill(prompts=6)
    await cluster.until(lambda: all(node.mover.settled for node in cluster.live()))
    cluster.wire.moments = 0
    return cluster


def _count(move: str) -> int:
    """Moments of the move when nobody dies."""
    moments: list[int] = []

    async def main() -> None:
        cluster = await _begin(move)
        cluster.install(MOVES[move][0](cluster))
        await _settled(cluster)
        moments.append(cluster.wire.moments)
        await cluster.close()

    run(main)
    return moments[0]


@pytest.mark.parametrize("side", ["giver", "taker"])
@pytest.mark.parametrize("move", MOVES)
def test_killed_at_any_moment_of_a_move(move: str, side: str) -> None:
    moments = _count(move)
    assert moments > 8
    for at in range(1, moments + 1, max(1, moments // 12)):
        run(lambda at=at: _killed_at(at, move=move, victim=MOVES[move][1 if side == "giver" else 2]))  # type: ignore[misc]


async def _killed_at(at: int, *, move: str, victim: str) -> None:
    cluster = await _begin(move)
    killed: list[float] = []

    def kill(number: int, caller: str, callee: str) -> None:
        if number >= at and not killed and victim in (caller, callee):
            killed.append(clock())
            cluster[victim].kill()

    cluster.wire.at_moment = kill
    cluster.install(MOVES[move][0](cluster))
    await asyncio.sleep(20)
    for address in cluster.committed:  # two copies and one failure
        assert any(address.hash in node.store.blocks for node in cluster.live()), f"killed at {at}: lost"
        assert cluster.readable(address), f"killed at {at}: nobody asks who has it"
    if killed:
        cluster[victim].start()
    await _settled(cluster)
    await cluster.close()


def test_killed_again_and_again_it_still_ends() -> None:
    async def main() -> None:
        cluster = await _begin("join")
        next_kill = [3]

        def kill(number: int, caller: str, callee: str) -> None:
            if number >= next_kill[0] and "d" in (caller, callee) and cluster["d"].alive:
                next_kill[0] = number + 6
                cluster["d"].kill()

        cluster.wire.at_moment = kill
        cluster.install(add_node(cluster.state, spec("d")))
        for _ in range(15):
            await asyncio.sleep(3)
            if not cluster["d"].alive:
                cluster["d"].start()
            assert all(cluster.readable(address) for address in cluster.committed)
        cluster.wire.at_moment = lambda number, caller, callee: None
        if not cluster["d"].alive:
            cluster["d"].start()
        await _settled(cluster)
        await cluster.close()

    run(main)


def test_a_restart_in_the_middle_of_the_pull_goes_on_with_what_is_missing() -> None:
    async def main() -> None:
        cluster = await _begin("join")
        node = cluster["d"]

        def kill(number: int, caller: str, callee: str) -> None:
            if node.alive and len(node.store.blocks) == 3:
                node.kill()

        cluster.wire.at_moment = kill
        cluster.install(add_node(cluster.state, spec("d")))
        await cluster.until(lambda: not node.alive, limit_s=5)
        assert node.file.kept is not None
        assert not node.file.kept.pulled
        cluster.wire.at_moment = lambda number, caller, callee: None
        node.start()
        await cluster.until(lambda: node.mover.settled, limit_s=60)
        assert node.file.kept.pulled
        assert len(node.store.written) == len(set(node.store.written)), "copied twice"
        await _settled(cluster)
        await cluster.close()

    run(main)


def test_after_an_interrupted_pull_owners_of_all_rings_before_are_asked() -> None:
    """The owner by the ring before never got the blocks: they are with the one before it."""

    async def main() -> None:
        cluster = Cluster("abc", replicas=0)
        await cluster.fill()
        await cluster.until(lambda: all(node.mover.settled for node in cluster.live()))
        vnode = _vnode(cluster)
        cluster["b"].kill()
        cluster.install(move_vnode(cluster.state, vnode, "b"))
        await asyncio.sleep(3)
        cluster.install(move_vnode(cluster.state, vnode, "c"))
        assert not cluster.placed()
        cluster["c"].kill()
        cluster["c"].start()
        ring = cluster["c"].rings.ring
        mine = [x for x in cluster.committed if ring.vnode_at(position_of(x.segment))[0] == vnode]
        await cluster.until(lambda: all(x.hash in cluster["c"].store.blocks for x in mine), limit_s=1)
        await cluster.close()

    run(main)


def test_a_node_that_never_comes_back_holds_up_the_move_for_a_bounded_time() -> None:
    async def main() -> None:
        cluster = Cluster("abc", down_s=60.0)
        cluster.add("d")
        await cluster.fill(prompts=6)
        cluster["a"].kill()
        cluster.install(add_node(cluster.state, spec("d")))
        await asyncio.sleep(30)
        assert not cluster["d"].mover.settled, "what only a had would never be asked for"
        await cluster.until(lambda: cluster["d"].mover.settled, limit_s=120)
        assert all(
            address.hash in owner.store.blocks
            for address in cluster.committed
            for owner in cluster.owners(address)
            if owner.alive
        )
        await cluster.close()

    run(main)


def test_nothing_goes_while_one_of_two_new_owners_is_down() -> None:
    """Both old owners leave: no block may be left with one holder because the other is away for a moment."""

    async def main() -> None:
        cluster = Cluster("ab")
        for name in "cd":
            cluster.add(name)
        await cluster.fill(prompts=6)
        cluster["d"].kill()
        state = add_node(add_node(cluster.state, spec("c")), spec("d"))
        cluster.install(drain_node(drain_node(state, "a"), "b"))
        await asyncio.sleep(200)
        stores: list[MemoryStore] = [node.store for node in cluster.live()]
        for address in cluster.committed:
            assert sum(address.hash in store.blocks for store in stores) == 3
        cluster["d"].start(cluster.state)
        await _settled(cluster)
        await cluster.close()

    run(main)
