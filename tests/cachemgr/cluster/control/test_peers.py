"""Peers are looked after: who is down is found and found back without a request, who left is let go."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cachemgr.cluster.contract import Fetched
from cachemgr.cluster.control.latency import FLOOR_S, HALF_LIFE_S, Latency
from cachemgr.cluster.control.peers import PROBES
from cachemgr.ring import NodeSpec, RingState, add_node, first_state, set_replicas
from cachemgr.shard import BlockAddress
from tests.cachemgr.cluster.control.clock import TurnedClock
from tests.cachemgr.cluster.control.half_dead import half_dead, silent
from tests.cachemgr.cluster.control.nodes import Node, cluster, run
from tests.cachemgr.cluster.control.stores import FORMAT, chain

BLOCKS = chain("x", 2)
NAMES = [block.hash for block in BLOCKS]


def with_address(state: RingState, node: str, address: str) -> RingState:
    nodes = tuple(NodeSpec(n.id, address if n.id == node else n.address) for n in state.nodes)
    return RingState(state.epoch + 1, nodes, {}, state.replicas)


async def come_true(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


class SlowBulk:
    """A bulk channel whose gets end when they are told to."""

    def __init__(self) -> None:
        self.end = asyncio.Event()
        self.closed_under: list[bool] = []

    async def get(self, store: object, blocks: Sequence[BlockAddress], *, deadline: float) -> Fetched:
        await self.end.wait()
        return Fetched((True,) * len(blocks))

    async def close(self) -> None:
        self.closed_under.append(not self.end.is_set())


def test_a_node_nobody_asks_is_found_down_and_found_back(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "ab", breaker_s=0.05) as (a, b):
            a.peers.start()
            await b.stop()
            await come_true(lambda: a.to(b).down_since is not None)
            since = a.to(b).down_since
            await asyncio.sleep(0.2)
            assert a.to(b).down_since == since
            await b.start()
            await come_true(lambda: a.to(b).usable)
            assert a.to(b).down_since is None

    run(test)


def test_a_node_that_says_hello_is_back_at_once(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "ab", breaker_s=60.0) as (a, b):
            a.peers.start()
            await b.stop()
            assert await a.to(b).lookup(FORMAT, NAMES, deadline=a.within()) == [None, None]
            assert not a.to(b).usable
            await b.start()
            assert await b.to(a).exchange_ring(deadline=b.within()) == a.rings.version
            await come_true(lambda: a.to(b).usable)

    run(test)


def test_a_node_that_says_hello_while_it_drains_stays_unused(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "ab", breaker_s=60.0) as (a, b):
            a.peers.start()
            b.control.drain()
            await b.peers.say_drain()
            await b.to(a)._control.greet(deadline=b.within())
            await come_true(lambda: b.control.calls.get("Ring"))
            assert a.to(b).status.state == "draining"

    run(test)


def test_a_ring_reaches_those_that_nobody_told(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "abc", breaker_s=0.05) as (a, b, c):
            a.rings.install(set_replicas(a.rings.ring.state, 2))
            for node in (b, c):
                node.peers.start()
            await come_true(lambda: {n.rings.version for n in (a, b, c)} == {a.rings.version})

    run(test)


def test_the_breaker_closes_by_a_probe_in_its_own_time(tmp_path: Path) -> None:
    clock = TurnedClock()

    async def test() -> None:
        async with cluster(tmp_path, "ab", clock=clock, breaker_s=5.0) as (a, b):
            await b.stop()
            assert await a.to(b).lookup(FORMAT, NAMES, deadline=a.within()) == [None, None]
            assert a.to(b).status.state == "open"
            await b.start()
            clock.turn(4.9)
            assert not a.to(b).probe_due
            assert not await a.to(b).probe()
            clock.turn(0.1)
            assert a.to(b).probe_due
            assert a.to(b).status.down_s == 5.0
            assert await a.to(b).probe()
            assert a.to(b).status.state == "closed"
            assert not a.to(b).probe_due
            clock.turn(5.0)
            assert a.to(b).probe_due, "nothing was heard for breaker_s"

    run(test)


def test_a_node_with_a_new_address_is_asked_there(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "abc") as (a, b, c):
            b.store.blocks.update({block.hash: block for block in BLOCKS})
            before = a.to(b)
            assert await before.lookup(FORMAT, NAMES, deadline=a.within()) == BLOCKS
            await b.close()
            spec = NodeSpec("b", c.spec.address)
            await c.stop()
            moved = await Node(spec, b.rings.ring.state, tmp_path / "moved", nodes=b.nodes).start()
            moved.store.blocks.update(b.store.blocks)
            a.rings.install(with_address(a.rings.ring.state, "b", spec.address))
            assert a.to(b) is not before
            assert not before.usable
            assert await a.to(b).lookup(FORMAT, NAMES, deadline=a.within()) == BLOCKS
            await moved.close()

    run(test)


def test_who_left_is_closed_once_what_runs_there_has_ended(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "ab") as (a, b):
            bulk = SlowBulk()
            peer = a.to(b)
            peer._bulk = bulk  # type: ignore[assignment]
            running = asyncio.create_task(peer.get(a.store, BLOCKS, deadline=a.within()))  # type: ignore[arg-type]
            await asyncio.sleep(0.01)
            a.rings.install(with_address(a.rings.ring.state, "b", "127.0.0.1:9"))
            await asyncio.sleep(0.05)
            late = await peer.get(a.store, BLOCKS, deadline=a.within())  # type: ignore[arg-type]
            assert late.arrived == (False, False)
            assert bulk.closed_under == []
            bulk.end.set()
            assert (await running).arrived == (True, True)
            await come_true(lambda: bulk.closed_under == [False])

    run(test)


def test_closing_breaks_off_what_runs(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "a") as (a,), half_dead(silent) as port:
            a.rings.install(add_node(a.rings.ring.state, NodeSpec("h", f"127.0.0.1:{port}")))
            running = asyncio.create_task(a.to("h").lookup(FORMAT, NAMES, deadline=a.within(60.0)))
            await asyncio.sleep(0.05)
            await asyncio.wait_for(a.peers.close(), 5)
            assert await asyncio.wait_for(running, 5) == [None, None]

    run(test)


def test_a_caller_that_gives_up_leaves_nothing_behind(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "a") as (a,), half_dead(silent) as port:
            a.rings.install(add_node(a.rings.ring.state, NodeSpec("h", f"127.0.0.1:{port}")))
            running = asyncio.create_task(a.to("h").lookup(FORMAT, NAMES, deadline=a.within(60.0)))
            await asyncio.sleep(0.05)
            assert a.to("h").load > FLOOR_S
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert a.to("h").load == FLOOR_S
            assert not a.to("h").troubles

    run(test)


def test_probes_are_few_at_a_time(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "a", breaker_s=0.05) as (a,), half_dead(silent) as port:
            state = a.rings.ring.state
            many = [NodeSpec(f"h{i}", f"127.0.0.1:{port}") for i in range(2 * PROBES)]
            a.rings.install(
                RingState(2, first_state([*state.nodes, *many], replicas=1).nodes, {}, state.replicas)
            )
            a.peers.start()
            await asyncio.sleep(0.3)
            assert len(a.peers._probing) == PROBES
            await asyncio.wait_for(a.peers.close(), 5)

    run(test)


def test_counters_outlive_the_peers_they_came_from(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "ab") as (a, b):
            await b.stop()
            await a.to(b).lookup(FORMAT, NAMES, deadline=a.within())
            await a.to(b).lookup(FORMAT, NAMES, deadline=a.within())
            before = a.peers.counters()
            assert before == {
                "cluster_peer_trouble_refused_total": 1.0,
                "cluster_peer_trouble_not_asked_total": 1.0,
                "cluster_peer_breaker_opened_total": 1.0,
                "cluster_peers": 1.0,
                "cluster_peers_usable": 0.0,
            }
            a.rings.install(with_address(a.rings.ring.state, "b", "127.0.0.1:9"))
            assert a.peers.counters() == {**before, "cluster_peers_usable": 1.0}

    run(test)


def test_load_is_latency_times_what_is_under_way() -> None:
    clock = TurnedClock()
    latency = Latency(clock=clock)
    assert latency.seconds == FLOOR_S
    for _ in range(50):
        latency.note(0.2)
    assert latency.seconds == pytest.approx(0.2, rel=0.01)
    clock.turn(HALF_LIFE_S)
    assert latency.seconds == pytest.approx(0.1, rel=0.01)
    clock.turn(100 * HALF_LIFE_S)
    assert latency.seconds == FLOOR_S, "somebody should try it again"
