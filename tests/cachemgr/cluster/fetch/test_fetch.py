"""What a fetch brings, from whom, and how many requests that takes."""

import asyncio
import time

import pytest

from cachemgr import BlockHash
from cachemgr.ring import NodeId, NodeSpec, add_node, position_of
from tests.cachemgr import host
from tests.cachemgr.cluster.fetch.nodes import Cluster, cluster


def not_ours(owners: list[tuple[str, ...]]) -> bool:
    return all("n0" not in of_segment for of_segment in owners)


def test_brings_a_whole_prompt_and_its_bytes_are_right() -> None:
    with cluster() as c:
        hashes = c.chain(70, where=not_ours)
        c.place_all(hashes)
        c.fetch(hashes)
        assert c.me.has(hashes) == list(range(70))
        assert host.read(c.me.cache, hashes) == 70
        assert c.fetcher.counters()["cluster_fetched_blocks_total"] == 70


def test_each_block_travels_once() -> None:
    with cluster() as c:
        hashes = c.chain(70, where=not_ours)
        c.place_all(hashes)
        c.fetch(hashes)
        assert sorted(name for asked in c.gets for name in asked) == sorted(hashes)


def test_nothing_is_asked_when_nothing_is_missing() -> None:
    with cluster() as c:
        hashes = c.chain(20)
        c.place(hashes, range(20), "n0")
        c.fetch(hashes)
        assert c.gets == []


@pytest.mark.parametrize("replicas", [0, 1, 2])
def test_a_cold_prompt_costs_one_block_asked_of_the_owners_of_its_first_segment(replicas: int) -> None:
    with cluster(nodes=6, replicas=replicas) as c:
        hashes = c.chain(16 * 20, where=lambda owners: "n0" not in owners[0])
        c.fetch(hashes)
        assert c.gets == [[hashes[0]]] * (1 + replicas)
        asked = {peer.node for peer in c.peers.values() if peer.gets}
        assert asked == set(c.owners(hashes, 0))
        assert c.fetcher.counters()["cluster_cold_fetches_total"] == 1


def test_a_cold_prompt_that_is_ours_to_have_costs_nothing() -> None:
    with cluster(replicas=0) as c:
        c.fetch(c.chain(64, where=lambda owners: owners[0] == ("n0",)))
        assert c.gets == []


def test_what_one_peer_has_of_several_segments_travels_in_one_request() -> None:
    with cluster(nodes=4, replicas=0) as c:
        hashes = c.chain(48, where=lambda owners: owners == [("n1",), ("n2",), ("n1",)])
        c.place_all(hashes)
        c.fetch(hashes)
        assert c.peers["n1"].gets == [hashes[:1], hashes[1:16] + hashes[32:]]
        assert c.peers["n2"].gets == [hashes[16:32]]


def test_one_node_to_ask_is_not_probed() -> None:
    with cluster(nodes=2, replicas=1) as c:
        hashes = c.chain(48)
        c.place_all(hashes)
        c.fetch(hashes)
        assert c.gets == [hashes]


def test_one_segment_is_not_probed() -> None:
    with cluster(replicas=0) as c:
        hashes = c.chain(16, where=not_ours)
        c.place_all(hashes)
        c.fetch(hashes)
        assert c.gets == [hashes]


def test_a_block_that_one_candidate_lacks_is_asked_of_the_next() -> None:
    with cluster(replicas=1) as c:
        hashes = c.chain(16, where=not_ours)
        primary, replica = c.owners(hashes, 0)
        c.place(hashes, range(0, 16, 2), primary)
        c.place(hashes, range(1, 16, 2), replica)
        c.fetch(hashes)
        assert c.me.has(hashes) == list(range(16))
        assert sorted(map(len, c.gets)) == [8, 16]


def test_nothing_is_asked_for_beyond_a_gap() -> None:
    with cluster(nodes=4, replicas=1) as c:
        hashes = c.chain(16 * 40, where=lambda owners: not_ours(owners[:3]))
        c.place_all(hashes[: 16 + 5])
        c.place_all(hashes[:48], but=range(21, 48))
        c.fetch(hashes)
        assert c.me.has(hashes) == list(range(21))
        assert max(hashes.index(name) for asked in c.gets for name in asked) < 16 * 10
        assert len(c.gets) < 20


def test_what_is_in_flight_beyond_a_gap_arrives_and_goes_no_further() -> None:
    with cluster(nodes=5, replicas=1) as c:
        hashes = c.chain(
            48,
            where=lambda owners: not_ours(owners) and not {*owners[2]} & {*owners[0], *owners[1]},
        )
        late, later = (c.peers[node] for node in c.owners(hashes, 32))
        c.place_all(hashes[:20])
        c.place(hashes, range(32, 40), late.node, later.node)
        late.delay_s = later.delay_s = 0.05

        async def go() -> float:
            began = time.monotonic()
            await c.fetcher.fetch(c.me.store, hashes, deadline=began + 5)
            took = time.monotonic() - began
            await c.settle()
            return took

        assert asyncio.run(go()) < 0.05, "whoever reads does not wait for what is beyond the gap"
        assert c.me.has(hashes) == [*range(20), *range(32, 40)]
        assert len(late.gets) + len(later.gets) == 1, "what is still missing there was not asked for again"


def test_segments_that_are_here_are_used_and_not_asked_for() -> None:
    with cluster(replicas=0) as c:
        hashes = c.chain(48, where=lambda owners: owners[1] == ("n0",) and not_ours(owners[::2]))
        c.place_all(hashes)
        c.place(hashes, range(16, 32), "n0")
        c.fetch(hashes)
        assert c.me.cache.lookup(hashes) == 48
        assert not {*hashes[16:32]} & {name for asked in c.gets for name in asked}


def joined(c: Cluster) -> tuple[list[BlockHash], NodeId]:
    """n4 joins the ring; a prompt of one segment that it took over, and from whom."""
    before = c.rings.ring
    c.rings.install(add_node(before.state, NodeSpec("n4", "127.0.0.1:7000")))
    hashes = c.chain(16, where=lambda owners: owners == [("n4",)])
    while (old := before.owners(position_of(hashes[0]), 1)[0]) == "n0":
        hashes = c.chain(16, where=lambda owners: owners == [("n4",)])
    return hashes, old


def test_owners_of_the_ring_before_are_asked_while_it_is_there() -> None:
    with cluster(nodes=5, replicas=0, on_ring=4) as c:
        hashes, old = joined(c)
        c.place(hashes, range(16), old)
        c.fetch(hashes)
        assert c.me.has(hashes) == list(range(16))
        assert [peer.node for peer in c.peers.values() if peer.gets] == sorted([old, NodeId("n4")])


def test_without_a_ring_before_its_owners_are_not_asked() -> None:
    with cluster(nodes=5, replicas=0, on_ring=4) as c:
        hashes, old = joined(c)
        c.rings.earlier.clear()
        c.place(hashes, range(16), old)
        c.fetch(hashes)
        assert [peer.node for peer in c.peers.values() if peer.gets] == ["n4"]
        assert c.me.has(hashes) == []


def test_a_store_with_too_little_room_ends_the_fetch() -> None:
    with cluster(room=64) as c:
        held = c.chain(60)
        c.place(held, range(60), "n0")
        lease = c.me.cache.acquire(held, deadline=None)
        hashes = c.chain(32, where=not_ours)
        c.place_all(hashes)
        c.fetch(hashes)
        assert 0 < len(c.me.has(hashes)) <= 4
        assert c.me.has(held) == list(range(60))
        assert len(c.gets) < 8
        lease.release()
