"""A list seeds the first ring; changes spread by push and gossip, and of two at once one is told it lost."""

import asyncio
import logging
from pathlib import Path

import pytest

from cachemgr.ring import RingError, add_node, move_vnode, remove_node, set_replicas
from tests.cachemgr.cluster.members.rig import Network, Node, eventually, spec

LIST = [spec("a", 7001), spec("b", 7002), spec("c", 7003)]


async def three(network: Network, *, gossip_s: float = 600.0) -> list[Node]:
    return [await network.static(me, LIST, gossip_s=gossip_s).start() for me in LIST]


def test_every_node_seeds_the_same_ring_of_epoch_1(tmp_path: Path) -> None:
    async def run() -> None:
        async with Network(tmp_path) as network:
            nodes = await three(network)
            assert {node.version for node in nodes} == {nodes[0].version}
            assert nodes[0].version.epoch == 1
            assert nodes[0].names == ["a", "b", "c"]
            assert nodes[0].state.replicas == 1
            assert [node.members.trouble for node in nodes] == ["", "", ""]
            assert dict(await nodes[0].members.nodes()) == {one.id: one for one in LIST}

    asyncio.run(run())


def test_a_change_is_everywhere_when_publish_returns(tmp_path: Path) -> None:
    async def run() -> None:
        async with Network(tmp_path) as network:
            a, b, c = await three(network)
            wanted = set_replicas(a.state, 2)
            assert await a.members.publish(wanted, replaces=a.version) is None
            assert a.version == b.version == c.version == wanted.version

    asyncio.run(run())


def test_who_is_removed_hears_of_it(tmp_path: Path) -> None:
    async def run() -> None:
        async with Network(tmp_path) as network:
            a, _, c = await three(network)
            assert await a.members.publish(remove_node(a.state, "c"), replaces=a.version) is None
            assert c.names == ["a", "b"]
            assert c.members.trouble.startswith("c is not on the ring: `tensorcache ring add c --address")

    asyncio.run(run())


def test_a_change_of_a_ring_that_is_not_in_force_names_the_one_that_is(tmp_path: Path) -> None:
    async def run() -> None:
        async with Network(tmp_path) as network:
            a, b, _ = await three(network)
            old, stale = a.version, set_replicas(a.state, 2)
            assert await b.members.publish(set_replicas(b.state, 0), replaces=old) is None
            assert await a.members.publish(stale, replaces=old) == b.version
            assert a.state.replicas == 0

    asyncio.run(run())


@pytest.mark.parametrize("round_", range(4))
def test_of_two_admins_at_two_nodes_exactly_one_wins(tmp_path: Path, round_: int) -> None:
    async def run() -> None:
        async with Network(tmp_path) as network:
            a, b, c = await three(network)
            before = a.version
            changes = (set_replicas(a.state, 2), move_vnode(b.state, f"a#{round_}", "b"))
            lost_to = await asyncio.gather(
                a.members.publish(changes[0], replaces=before), b.members.publish(changes[1], replaces=before)
            )
            assert sum(one is None for one in lost_to) == 1
            winner = changes[lost_to.index(None)].version
            assert winner in lost_to
            assert a.version == b.version == c.version == winner

    asyncio.run(run())


def test_of_two_admins_at_one_node_the_second_is_told(tmp_path: Path) -> None:
    async def run() -> None:
        async with Network(tmp_path) as network:
            a, _, _ = await three(network)
            before = a.version
            first, second = set_replicas(a.state, 2), set_replicas(a.state, 3)
            lost_to = await asyncio.gather(
                a.members.publish(first, replaces=before), a.members.publish(second, replaces=before)
            )
            assert lost_to == [None, first.version]

    asyncio.run(run())


def test_a_change_that_is_not_above_what_it_replaces_is_refused(tmp_path: Path) -> None:
    async def run() -> None:
        async with Network(tmp_path) as network:
            a, _, _ = await three(network)
            with pytest.raises(RingError, match="epoch: must be above 1"):
                await a.members.publish(a.state, replaces=a.version)

    asyncio.run(run())


def test_who_was_away_learns_of_it_by_gossip(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with Network(tmp_path) as network:
            a, b, c = await three(network, gossip_s=0.02)
            c.reachable = False
            wanted = set_replicas(a.state, 2)
            assert await a.members.publish(wanted, replaces=a.version) is None
            assert "ring 2: not yet known to c" in caplog.text
            assert (b.version, c.version.epoch) == (wanted.version, 1)
            assert c.members.trouble == "none of the 2 other nodes answers"
            assert set(await c.members.nodes()) == {"c"}
            c.reachable = True
            await eventually(lambda: c.version == wanted.version)

    caplog.set_level(logging.WARNING)
    asyncio.run(run())


def test_who_starts_late_has_the_newest_ring_when_start_returns(tmp_path: Path) -> None:
    async def run() -> None:
        async with Network(tmp_path) as network:
            a, _ = [await network.static(me, LIST).start() for me in LIST[:2]]
            await a.members.publish(set_replicas(a.state, 3), replaces=a.version)
            late = await network.static(LIST[2], LIST).start()
            assert late.version == a.version

    asyncio.run(run())


def test_the_ring_on_disk_goes_before_the_list(tmp_path: Path) -> None:
    async def run() -> None:
        async with Network(tmp_path) as network:
            a = await network.static(LIST[0], LIST).start()
            await a.members.publish(add_node(a.state, spec("d", 7004)), replaces=a.version)
            await a.members.close()
            again = await network.static(LIST[0], LIST).start()
            assert (again.version.epoch, again.names) == (2, ["a", "b", "c", "d"])

    asyncio.run(run())


def test_who_is_not_listed_is_told_so_and_joins_by_an_add(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with Network(tmp_path) as network:
            a, _, _ = await three(network)
            me = spec("d", 7004)
            d = await network.static(me, LIST).start()
            line = "d is not on the ring: `tensorcache ring add d --address 127.0.0.1:7004` puts it there"
            assert d.members.trouble == line
            assert [one.message for one in caplog.records if "not on the ring" in one.message] == [line]
            await a.members.publish(add_node(a.state, me), replaces=a.version)
            assert d.version == a.version
            assert d.members.trouble == ""

    asyncio.run(run())


def test_who_moved_to_another_address_is_told_what_to_do(tmp_path: Path) -> None:
    async def run() -> None:
        async with Network(tmp_path) as network:
            moved = await network.static(spec("a", 7999), LIST).start()
            assert "has a at 127.0.0.1:7001, but it is at 127.0.0.1:7999" in moved.members.trouble

    asyncio.run(run())


def test_close_stops_asking_and_may_be_called_twice(tmp_path: Path) -> None:
    async def run() -> None:
        async with Network(tmp_path) as network:
            a, *_ = await three(network, gossip_s=0.01)
            await eventually(lambda: a.exchanges > 3)
            await a.members.close()
            await a.members.close()
            asked = a.exchanges
            await asyncio.sleep(0.1)
            assert a.exchanges == asked

    asyncio.run(run())
