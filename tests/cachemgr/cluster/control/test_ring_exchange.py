"""Rings travel with whatever is said: who is behind is told, who is ahead tells; one of two changes wins."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from cachemgr.cluster.control.grpc_service import ask
from cachemgr.cluster.control.messages import RING, Replaces, RingRequest
from cachemgr.cluster.members.static_members import StaticMembers
from cachemgr.contract import BlockHash
from cachemgr.ring import NodeSpec, RingState, add_node, decode_ring, encode_ring, remove_node, set_replicas
from tests.cachemgr.cluster.control.nodes import CLUSTER, Node, cluster, run
from tests.cachemgr.cluster.control.stores import FORMAT

NAMES = [BlockHash(b"n" * 16)]


async def come_true(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def changed(node: Node, replicas: int) -> RingState:
    return set_replicas(node.rings.ring.state, replicas)


def test_who_is_behind_gets_the_ring_with_the_answer(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "ab") as (a, b):
            b.rings.install(changed(b, 2))
            assert await a.to(b).lookup(FORMAT, NAMES, deadline=a.within()) == [None]
            assert a.rings.ring.state == b.rings.ring.state
            assert a.rings.ring.replicas == 2
            assert "Ring" not in b.control.calls

    run(test)


def test_who_is_ahead_shows_its_ring_once(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "ab") as (a, b):
            await a.to(b).lookup(FORMAT, NAMES, deadline=a.within())
            a.rings.install(changed(a, 2))
            await asyncio.gather(*(a.to(b).lookup(FORMAT, NAMES, deadline=a.within()) for _ in range(10)))
            await come_true(lambda: b.rings.version == a.rings.version)
            for _ in range(3):
                await a.to(b).lookup(FORMAT, NAMES, deadline=a.within())
            assert b.control.calls["Ring"] == 1

    run(test)


def test_a_ring_that_is_not_taken_is_not_shown_again(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "ab") as (a, b):
            b.rings.install = lambda state: False  # type: ignore[method-assign]
            a.rings.install(changed(a, 2))
            for _ in range(5):
                await a.to(b).lookup(FORMAT, NAMES, deadline=a.within())
                await asyncio.sleep(0.01)
            await come_true(lambda: b.control.calls.get("Ring") == 1)
            a.rings.install(changed(a, 3))
            await a.to(b).lookup(FORMAT, NAMES, deadline=a.within())
            await come_true(lambda: b.control.calls["Ring"] == 2)

    run(test)


def test_an_exchange_carries_the_ring_both_ways(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "ab") as (a, b):
            a.rings.install(changed(a, 2))
            assert await a.to(b).exchange_ring(deadline=a.within()) == a.rings.version
            assert b.rings.ring.state == a.rings.ring.state
            b.rings.install(changed(b, 3))
            assert await a.to(b).exchange_ring(deadline=a.within()) == b.rings.version
            assert a.rings.ring.state == b.rings.ring.state
            assert await a.to(b).exchange_ring(deadline=a.within()) == b.rings.version

    run(test)


def test_of_two_rings_of_one_epoch_the_higher_one_wins_from_either_side(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "ab") as (a, b):
            low, high = sorted((changed(a, 2), changed(a, 3)), key=lambda state: state.version)
            a.rings.install(low)
            b.rings.install(high)
            assert await a.to(b).exchange_ring(deadline=a.within()) == high.version
            assert a.rings.ring.state == high

    run(test)


def test_a_ring_that_cannot_be_read_fails_no_call(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It may be that of a newer release."""

    async def test() -> None:
        async with cluster(tmp_path, "ab") as (a, b):
            b.rings.install(changed(b, 2))
            b.rings._encoded = b.rings._encoded.replace(b'"epoch"', b'"epoch_of_next_year"')
            for _ in range(3):
                assert await a.to(b).lookup(FORMAT, NAMES, deadline=a.within()) == [None]
            assert not a.to(b).troubles
            assert a.rings.version.epoch == 1

    run(test)
    assert sum("cannot be read here" in record.getMessage() for record in caplog.records) == 1


def test_a_person_gets_the_ring_and_changes_it(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "a") as (a,):
            async def say(request: RingRequest) -> object:
                return await asyncio.to_thread(ask, a.spec.address, RING, request, timeout_s=10.0)

            got = await say(RingRequest(cluster=CLUSTER))
            state = decode_ring(got.state)  # type: ignore[attr-defined]
            assert state == a.rings.ring.state
            wanted, replaces = set_replicas(state, 2), Replaces(*state.version)
            request = RingRequest(cluster=CLUSTER, state=encode_ring(wanted), replaces=replaces)
            won = await say(request)
            assert (won.accepted, won.version) == (True, wanted.version)  # type: ignore[attr-defined]
            assert a.rings.ring.state == wanted
            other = set_replicas(state, 3)
            lost = await say(RingRequest(cluster=CLUSTER, state=encode_ring(other), replaces=replaces))
            assert not lost.accepted  # type: ignore[attr-defined]
            assert lost.version == wanted.version  # type: ignore[attr-defined]
            assert a.rings.ring.state == wanted

    run(test)


@pytest.mark.parametrize("seed", range(5))
def test_two_admins_at_once_one_wins_and_the_other_learns_what_it_lost_to(tmp_path: Path, seed: int) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "abc") as nodes:
            random, first = Random(seed), nodes[0].rings.ring.state
            members = [
                StaticMembers(node.spec, first.nodes, replicas=1, call_s=10.0, gossip_s=600.0, random=random)
                for node in nodes
            ]
            for node, membership in zip(nodes, members, strict=True):
                await membership.start(node.rings, node.peers)
            wishes = [set_replicas(first, 2), set_replicas(first, 3)]

            async def change(at: int, wish: RingState) -> object:
                await asyncio.sleep(random.uniform(0, 0.01))
                return await members[at].publish(wish, replaces=first.version)

            outcomes = await asyncio.gather(change(0, wishes[0]), change(1, wishes[1]))
            in_force = {node.rings.version for node in nodes}
            assert len(in_force) == 1
            winner = outcomes.index(None)
            assert outcomes.count(None) == 1
            assert outcomes[1 - winner] == wishes[winner].version
            assert in_force == {wishes[winner].version}
            for membership in members:
                await membership.close()

    run(test)


def test_peers_of_the_ring_before_stay_until_it_is_forgotten(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "abc") as (a, b, c):
            kept, leaver = a.to(b), a.to(c)
            a.rings.install(remove_node(a.rings.ring.state, "c"))
            assert [peer.node for peer in a.peers.others()] == ["b"]
            assert a.to(c) is leaver
            assert await leaver.lookup(FORMAT, NAMES, deadline=a.within()) == [None]
            a.rings.install(add_node(a.rings.ring.state, NodeSpec("d", "127.0.0.1:9")))
            assert [peer.node for peer in a.peers.others()] == ["b", "d"]
            assert a.to(b) is kept
            assert a.peers.peer(a.id) is None
            a.rings._earlier.clear()  # their time is over
            a.peers._follow()
            assert a.peers.peer(c.id) is None
            assert not leaver.usable

    run(test)
