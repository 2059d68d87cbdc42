"""Nodes that meet in a real Redis: joining, changing the ring, and what each sees of the others."""

import asyncio
import contextlib
import time
from pathlib import Path

import pytest

from cachemgr.cluster.members.redis_members import Pace, with_node
from cachemgr.ring import NodeSpec, RingError, drain_node, first_state, move_vnode, remove_node, set_replicas
from tests.cachemgr.cluster.members.rig import LIMIT_S, Network, Node, eventually, spec
from tests.redis_server import RedisServer

A, B, C = spec("a", 7001), spec("b", 7002), spec("c", 7003)
RING = "tensorcache:test:ring"


async def same_ring(*nodes: Node) -> None:
    await eventually(lambda: len({node.version for node in nodes}) == 1)


def test_who_starts_first_makes_the_ring_of_itself(tmp_path: Path, redis_server: RedisServer) -> None:
    async def run() -> None:
        async with Network(tmp_path) as network:
            a = await network.redis(A, redis_server.url).start()
            assert (a.version.epoch, a.names, a.state.replicas) == (1, ["a"], 1)
            assert redis_server.command("HGET", RING, "version").startswith(b"00000000000000000001:")
            assert a.members.trouble == ""
            assert redis_server.command("KEYS", "*").count(b"tensorcache:test:") == 3

    asyncio.run(run())


def test_others_join_by_themselves(tmp_path: Path, redis_server: RedisServer) -> None:
    async def run() -> None:
        async with Network(tmp_path) as network:
            a = await network.redis(A, redis_server.url).start()
            b = await network.redis(B, redis_server.url).start()
            assert (b.version.epoch, b.names) == (2, ["a", "b"])
            await same_ring(a, b)
            assert dict(await a.members.nodes()) == {"a": A, "b": B}

    asyncio.run(run())


@pytest.mark.parametrize("round_", range(2))
def test_three_nodes_join_at_once(tmp_path: Path, redis_server: RedisServer, round_: int) -> None:
    async def run() -> None:
        async with Network(tmp_path) as network:
            nodes = [network.redis(me, redis_server.url) for me in (A, B, C)]
            await asyncio.gather(*(node.start() for node in nodes))
            await same_ring(*nodes)
            assert (nodes[0].version.epoch, nodes[0].names) == (3, ["a", "b", "c"])

    asyncio.run(run())


def test_a_restart_finds_its_place_and_tells_its_address(tmp_path: Path, redis_server: RedisServer) -> None:
    async def run() -> None:
        async with Network(tmp_path) as network:
            a = await network.redis(A, redis_server.url).start()
            b = await network.redis(B, redis_server.url).start()
            await same_ring(a, b)
            await a.members.publish(move_vnode(a.state, "b#127", "a"), replaces=a.version)
            await b.members.close()
            again = await network.redis(B, redis_server.url).start()
            assert (again.version, again.state.overrides) == (a.version, {"b#127": "a"})
            await again.members.close()
            moved = await network.redis(spec("b", 7999, weight=0.5), redis_server.url).start()
            assert (moved.version.epoch, moved.state.overrides) == (a.version.epoch + 1, {})
            await eventually(lambda: a.state.node("b") == spec("b", 7999, weight=0.5))

    asyncio.run(run())


def test_a_change_is_noticed_within_two_seconds_at_the_usual_pace(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    async def run() -> None:
        async with Network(tmp_path) as network:
            a = await network.redis(A, redis_server.url, pace=Pace()).start()
            b = await network.redis(B, redis_server.url, pace=Pace()).start()
            await same_ring(a, b)
            began = time.monotonic()
            assert await b.members.publish(set_replicas(b.state, 3), replaces=b.version) is None
            await same_ring(a, b)
            assert time.monotonic() - began < 2.0

    asyncio.run(run())


@pytest.mark.parametrize("round_", range(3))
def test_of_two_admins_exactly_one_wins(tmp_path: Path, redis_server: RedisServer, round_: int) -> None:
    async def run() -> None:
        async with Network(tmp_path) as network:
            a = await network.redis(A, redis_server.url).start()
            b = await network.redis(B, redis_server.url).start()
            await same_ring(a, b)
            before = a.version
            changes = (set_replicas(a.state, 2), move_vnode(b.state, f"a#{round_}", "b"))
            lost_to = await asyncio.gather(
                a.members.publish(changes[0], replaces=before), b.members.publish(changes[1], replaces=before)
            )
            assert sum(one is None for one in lost_to) == 1
            winner = changes[lost_to.index(None)].version
            assert winner in lost_to
            await same_ring(a, b)
            assert a.version == winner

    asyncio.run(run())


def test_a_change_of_an_older_ring_names_the_newer_one(tmp_path: Path, redis_server: RedisServer) -> None:
    async def run() -> None:
        async with Network(tmp_path) as network:
            a = await network.redis(A, redis_server.url).start()
            old, stale = a.version, set_replicas(a.state, 0)
            assert await a.members.publish(set_replicas(a.state, 2), replaces=old) is None
            assert await a.members.publish(stale, replaces=old) == a.version
            with pytest.raises(RingError, match="epoch: must be above 2"):
                await a.members.publish(stale, replaces=a.version)

    asyncio.run(run())


def test_who_is_removed_stays_so_until_it_starts_again(tmp_path: Path, redis_server: RedisServer) -> None:
    async def run() -> None:
        async with Network(tmp_path) as network:
            a = await network.redis(A, redis_server.url).start()
            b = await network.redis(B, redis_server.url).start()
            await same_ring(a, b)
            assert await a.members.publish(remove_node(a.state, "b"), replaces=a.version) is None
            await same_ring(a, b)
            await asyncio.sleep(0.3)  # many looks
            assert (a.names, b.names) == (["a"], ["a"])
            assert set(await a.members.nodes()) == {"a", "b"}
            await b.members.close()
            again = await network.redis(B, redis_server.url).start()
            assert again.names == ["a", "b"]

    asyncio.run(run())


def test_who_drains_goes_on_draining_over_a_restart(tmp_path: Path, redis_server: RedisServer) -> None:
    async def run() -> None:
        async with Network(tmp_path) as network:
            a = await network.redis(A, redis_server.url).start()
            b = await network.redis(B, redis_server.url).start()
            await same_ring(a, b)
            assert await a.members.publish(drain_node(a.state, "b"), replaces=a.version) is None
            await b.members.close()
            again = await network.redis(spec("b", 7555), redis_server.url).start()
            assert again.state.node("b") == spec("b", 7555, draining=True)

    asyncio.run(run())


def test_who_leaves_is_gone_at_once_and_who_dies_soon(tmp_path: Path, redis_server: RedisServer) -> None:
    async def run() -> None:
        async with Network(tmp_path) as network:
            a = await network.redis(A, redis_server.url).start()
            b = await network.redis(B, redis_server.url).start()
            await b.members.close()
            assert set(await a.members.nodes()) == {"a"}
            assert 0 < int(redis_server.command("PTTL", "tensorcache:test:node:a")[1:]) <= 5000
            x = "tensorcache:test:node:x"
            redis_server.command("SET", x, '{"id":"x","address":"h:1"}', "PX", "60000")
            redis_server.command("SADD", "tensorcache:test:nodes", "x", "y")
            assert set(await a.members.nodes()) == {"a", "x"}
            redis_server.command("PEXPIRE", x, "0")  # as it would by itself
            assert set(await a.members.nodes()) == {"a"}
            assert redis_server.command("SCARD", "tensorcache:test:nodes") == b":1"

    asyncio.run(run())


def test_two_nodes_of_one_name_are_told(tmp_path: Path, redis_server: RedisServer) -> None:
    async def run() -> None:
        async with Network(tmp_path / "1") as one, Network(tmp_path / "2") as other:
            first = await one.redis(A, redis_server.url).start()
            second = await other.redis(spec("a", 7555), redis_server.url).start()
            await eventually(lambda: "itself a, too: the one at 127.0.0.1:7555" in first.members.trouble)
            await eventually(lambda: "itself a, too: the one at 127.0.0.1:7001" in second.members.trouble)

    asyncio.run(run())


def test_with_node_keeps_what_is_right_already() -> None:
    state = first_state([A, B], replicas=1)
    assert with_node(state, A) is state
    assert with_node(state, C).node("c") == C
    narrower = with_node(move_vnode(move_vnode(state, "a#100", "b"), "a#1", "b"), spec("a", 7001, weight=0.5))
    assert (narrower.epoch, narrower.overrides) == (4, {"a#1": "b"})


@pytest.mark.parametrize(("late", "first"), [(A, B), (B, A)])
def test_a_ring_made_without_redis_displaces_nobody(
    tmp_path: Path, redis_server: RedisServer, late: NodeSpec, first: NodeSpec
) -> None:
    async def run() -> None:
        async with Network(tmp_path) as network:
            there = await network.redis(first, redis_server.url).start()
            node = network.redis(late, redis_server.url)
            node.rings.install(first_state([late], replicas=1))  # in one of two orders the higher one
            await node.start()
            assert node.names == ["a", "b"]
            await same_ring(node, there)

    asyncio.run(run())


def test_who_meets_an_older_cluster_joins_it(tmp_path: Path, redis_server: RedisServer) -> None:
    async def run() -> None:
        async with Network(tmp_path) as network:
            c = await network.redis(C, redis_server.url).start()  # first at a Redis that lost everything
            a = network.redis(A, redis_server.url)
            a.rings.install(set_replicas(first_state([A, B], replicas=1), 2))
            await a.start()
            assert a.names == ["a", "b"]
            await eventually(lambda: c.names == a.names == ["a", "b", "c"])

    asyncio.run(run())


def test_close_ends_even_if_a_cancellation_gets_lost(tmp_path: Path, redis_server: RedisServer) -> None:
    async def run() -> None:
        async with Network(tmp_path) as network:
            a = await network.redis(A, redis_server.url).start()
            looking = asyncio.Event()

            async def deaf() -> None:
                looking.set()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(LIMIT_S)

            a.members._look = deaf  # type: ignore[attr-defined]
            await looking.wait()
            await asyncio.wait_for(a.members.close(), LIMIT_S / 2)

    asyncio.run(run())
