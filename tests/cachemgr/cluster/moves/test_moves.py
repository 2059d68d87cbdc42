"""Joins, drains, leaves, moved vnodes, other replicas: new owners get what is theirs, old ones let it go."""

import asyncio
import itertools
import random
from collections.abc import Callable

import pytest

from cachemgr.ring import (
    RingState,
    add_node,
    drain_node,
    move_vnode,
    position_of,
    remove_node,
    set_replicas,
)
from tests.cachemgr.cluster.moves.cluster import Cluster, spec
from tests.cachemgr.cluster.moves.doubles import NBYTES
from tests.cachemgr.cluster.moves.virtual_time import clock, run


def _vnode_with_blocks(cluster: Cluster, home: str) -> str:
    """A vnode of `home` under which blocks lie."""
    ring = cluster.live()[0].rings.ring
    for address in cluster.committed:
        vnode, _, owner = ring.vnode_at(position_of(address.segment))
        if owner == home:
            return str(vnode)
    raise AssertionError(f"{home} has nothing")


Change = Callable[[Cluster], RingState]

CHANGES: dict[str, Change] = {
    "join": lambda cluster: add_node(cluster.state, spec("d")),
    "drain": lambda cluster: drain_node(cluster.state, "b"),
    "leave": lambda cluster: remove_node(cluster.state, "b"),
    "vnode": lambda cluster: move_vnode(cluster.state, _vnode_with_blocks(cluster, "a"), "c"),
}


@pytest.mark.parametrize("replicas", [0, 1, 2])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_after_a_change_owners_and_only_they_hold_every_block(change: Change, replicas: int) -> None:
    async def main() -> None:
        cluster = Cluster("abc", replicas=replicas)
        cluster.add("d")
        await cluster.fill()
        before = {address.hash: cluster.holders(address) for address in cluster.committed}
        cluster.install(change(cluster))
        if replicas < 2 or change is CHANGES["join"]:  # else all three had everything
            assert not cluster.only_owners_hold(), "nothing is to move"
        await cluster.until(cluster.placed, limit_s=5)
        for address in cluster.committed:
            assert before[address.hash] <= cluster.holders(address), "let go at once: a reader would miss it"
        await cluster.until(cluster.only_owners_hold, limit_s=60)
        await cluster.until(lambda: all(node.rings.pulled for node in cluster.live()), limit_s=5)
        assert all(node.mover.settled for node in cluster.live())
        await cluster.close()

    run(main)


def test_only_what_moves_is_copied_and_each_block_once() -> None:
    async def main() -> None:
        cluster = Cluster("abc")
        await cluster.fill(prompts=30)
        for node in cluster.live():
            node.store.written.clear()
        vnode = _vnode_with_blocks(cluster, "a")
        cluster.install(move_vnode(cluster.state, vnode, "c"))
        await cluster.until(cluster.only_owners_hold, limit_s=60)
        written = [name for node in cluster.live() for name in node.store.written]
        assert len(written) == len(set(written))
        moved = sum(cluster.holders(a) != {"a", "b"} for a in cluster.committed)
        assert 0 < len(written) <= moved
        await cluster.close()

    run(main)


def test_replicas_up_and_down_while_running() -> None:
    async def main() -> None:
        cluster = Cluster("abcde", replicas=1)
        await cluster.fill()
        cluster.install(set_replicas(cluster.state, 3))
        await cluster.until(cluster.placed, limit_s=30)
        assert {len(cluster.holders(address)) for address in cluster.committed} == {4}
        cluster.install(set_replicas(cluster.state, 0))
        await asyncio.sleep(120)
        assert {len(cluster.holders(address)) for address in cluster.committed} == {4}, "surplus copies stay"
        (address, *_) = cluster.commit(99)
        await cluster.until(lambda: all(node.replicator.idle for node in cluster.live()))
        assert len(cluster.holders(address)) == 1
        await cluster.close()

    run(main)


def test_a_move_keeps_its_rate() -> None:
    async def main() -> None:
        rate = 1 << 20
        cluster = Cluster("ab", replicas=0, copy_bytes_per_s=rate)
        cluster.add("c")
        await cluster.fill(prompts=80, blocks=16)
        cluster.install(add_node(cluster.state, spec("c")))
        started = clock()
        await cluster.until(lambda: cluster["c"].mover.settled)
        copied = NBYTES * len(cluster["c"].store.written)
        assert copied > 5 * rate, "too little to tell"
        took = clock() - started
        assert copied / rate - 5 <= took <= copied / rate + 5  # a batch is up to four seconds of this rate
        await cluster.close()

    run(main)


def test_a_draining_node_says_when_it_is_empty() -> None:
    async def main() -> None:
        cluster = Cluster("abc")
        await cluster.fill()
        node = cluster["b"]
        surplus = next(a for a in cluster.committed if "b" not in cluster.holders(a))
        node.store.take(surplus)
        lonely = cluster.commit(1000, 1, at="b")[0]
        for holder in cluster.live():
            holder.store.drop([lonely.hash])
        node.store.take(lonely)  # its owners never got it
        cluster.install(drain_node(cluster.state, "b"))
        assert not node.handover.drained()
        assert not cluster["a"].handover.drained(), "it owns something"
        await cluster.until(node.handover.drained, limit_s=60)
        assert cluster.placed()
        assert set(node.store.blocks) <= {surplus.hash, lonely.hash}, "its own arcs are not empty"
        for address in cluster.commit(1001, 4, at="b"):
            assert address.hash in node.store.blocks
        await cluster.until(cluster.placed, limit_s=10)
        await cluster.close()

    run(main)


def test_a_node_that_only_now_opens_a_store_catches_up() -> None:
    async def main() -> None:
        cluster = Cluster("abc")
        late, stores = cluster.add("d"), []
        late._stores = lambda: stores  # type: ignore[method-assign]
        late.kill()
        late.start(cluster.state)
        await cluster.fill()
        cluster.install(add_node(cluster.state, spec("d")))
        await asyncio.sleep(30)
        assert not late.store.blocks
        assert not late.rings.pulled, "no store has seen anything"
        stores.append(late.store)
        await cluster.until(cluster.only_owners_hold, limit_s=90)
        assert late.rings.pulled
        await cluster.close()

    run(main)


def test_what_is_being_read_goes_when_it_is_read() -> None:
    async def main() -> None:
        cluster = Cluster("abc", replicas=0)
        await cluster.fill()
        cluster.install(move_vnode(cluster.state, _vnode_with_blocks(cluster, "a"), "c"))
        at_a = [address for address in cluster.committed if "a" in cluster.holders(address)]
        going = [address for address in at_a if cluster.owners(address)[0].node == "c"]
        held = cluster["a"].store.hold([address.hash for address in going])
        await asyncio.sleep(30)
        assert all("a" in cluster.holders(address) for address in going)
        cluster["a"].store.let_go([shard for shard in held if shard is not None])
        await cluster.until(cluster.only_owners_hold, limit_s=90)
        await cluster.close()

    run(main)


def test_old_owners_are_asked_before_other_new_ones() -> None:
    """The other way round, a block could go from the one after it was not yet with the other."""

    async def main() -> None:
        cluster = Cluster("ab")
        for name in "cd":
            cluster.add(name)
        await cluster.fill()
        cluster.wire.calls.clear()
        state = add_node(add_node(cluster.state, spec("c")), spec("d"))
        cluster.install(drain_node(drain_node(state, "a"), "b"))
        await cluster.until(cluster.placed)
        listings = [call for call in cluster.wire.calls if call[3] == "list_arcs"]
        callees = [str(callee) for _, caller, callee, _, _ in listings if caller == "c"]
        asked = "".join(callee for callee, _ in itertools.groupby(callees))  # a listing comes in parts
        assert set(asked.replace("bad", "abd").split("abd")) == {""}, asked
        assert "abd" in asked.replace("bad", "abd")
        await cluster.close()

    run(main)


def test_a_full_arena_does_not_make_the_move_go_on_for_ever() -> None:
    async def main() -> None:
        cluster = Cluster("ab", replicas=0)
        cluster.add("c", room=3)
        await cluster.fill()
        cluster.install(add_node(cluster.state, spec("c")))
        await cluster.until(lambda: cluster["c"].mover.settled, limit_s=30)
        assert cluster["c"].mover.counters()["cluster_pull_skipped_blocks_total"] > 0
        await asyncio.sleep(60)
        assert all(cluster.holders(address) for address in cluster.committed), "let go without being taken"
        await cluster.close()

    run(main)


@pytest.mark.parametrize("seed", range(12))
def test_any_changes_in_any_order_lose_nothing(seed: int) -> None:
    """Rings follow each other at random, some before the move for the one before is done."""

    async def main() -> None:
        random_ = random.Random(seed)
        cluster = Cluster("abcd", replicas=random_.choice([1, 1, 2]))
        for name in "ef":
            cluster.add(name)
        await cluster.fill()
        committed = list(cluster.committed)

        def check(number: int, caller: str, callee: str) -> None:
            for address in random_.sample(committed, 4):
                assert cluster.readable(address), f"moment {number}: {address.hash.hex()} is gone"

        cluster.wire.at_moment = check
        for _ in range(8):
            cluster.install(_any_change(cluster, random_))
            await asyncio.sleep(random_.choice([0.0, 0.005, 0.05, 0.5, 8.0]))
            cluster.commit(random_.randrange(1 << 30))
        await cluster.until(cluster.placed, limit_s=120)
        assert all(cluster.readable(address) for address in cluster.committed)
        await cluster.until(cluster.only_owners_hold, limit_s=300)
        await cluster.close()

    run(main)


def _any_change(cluster: Cluster, random_: random.Random) -> RingState:
    state = cluster.state
    there = [node.id for node in state.nodes if not node.draining]
    absent = [name for name in "abcdef" if name not in there]
    if absent and random_.random() < 0.35:
        return add_node(state, spec(random_.choice(absent)))
    if len(there) > 3 and random_.random() < 0.4:
        name = random_.choice(there)
        return random_.choice([drain_node, remove_node])(state, name)
    home, target = random_.choice(there), random_.choice(there)
    vnode = f"{home}#{random_.randrange(8)}"
    if state.overrides.get(vnode, home) == target:
        return _any_change(cluster, random_)
    return move_vnode(state, vnode, target)
