"""Whom a reader asks, in which order, and how evenly."""

from collections import Counter
from itertools import islice
from random import Random

from cachemgr.cluster.fetch.candidates import Candidates
from cachemgr.ring import NodeSpec, add_node, extra_owners, position_of
from tests.cachemgr.cluster.fetch.nodes import Cluster, cluster
from tests.cachemgr.host import Clock


def candidates(c: Cluster, *, seed: int = 1) -> Candidates:
    return Candidates(c.rings, c.seen, hints=c.hints, clock=Clock(), random=Random(seed))


def not_ours(owners: list[tuple[str, ...]]) -> bool:
    return "n0" not in owners[0]


def firsts(c: Cluster, segment: bytes, *, reads: int = 2000) -> Counter[str]:
    order = candidates(c)
    return Counter(next(order.of(segment)).peer.node for _ in range(reads))  # type: ignore[arg-type]


def test_owners_come_before_those_of_the_ring_before_and_each_once() -> None:
    with cluster(nodes=6, replicas=1, on_ring=5) as c:
        before = c.rings.ring
        c.rings.install(add_node(before.state, NodeSpec("n5", "127.0.0.1:7000")))
        hashes = c.chain(16, where=lambda owners: not_ours(owners) and "n5" in owners[0])
        found = list(candidates(c).of(hashes[0]))
        owners = c.owners(hashes, 0)
        former = before.owners(position_of(hashes[0]), 2)
        assert {one.peer.node for one in found[:2]} == set(owners)
        assert [one.owner for one in found] == [True, True, *[False] * (len(found) - 2)]
        assert [one.peer.node for one in found[2:]] == [n for n in former if n not in owners and n != "n0"]


def test_we_never_ask_ourselves() -> None:
    with cluster(nodes=3, replicas=2) as c:
        hashes = c.chain(16)
        assert {one.peer.node for one in candidates(c).of(hashes[0])} == {"n1", "n2"}


def test_equal_loads_are_asked_evenly() -> None:
    with cluster(nodes=6, replicas=2) as c:
        asked = firsts(c, c.chain(16, where=not_ours)[0])
        assert len(asked) == 3
        assert max(asked.values()) < 1.15 * min(asked.values())


def test_noise_in_what_is_measured_draws_no_herd() -> None:
    with cluster(nodes=6, replicas=2) as c:
        hashes = c.chain(16, where=not_ours)
        for load, node in zip((0.010, 0.012, 0.015), c.owners(hashes, 0), strict=True):
            c.peers[node].load = load
        asked = firsts(c, hashes[0])
        assert max(asked.values()) < 1.15 * min(asked.values())


def test_the_loaded_one_of_two_is_left_alone() -> None:
    with cluster(replicas=1) as c:
        hashes = c.chain(16, where=not_ours)
        busy, free = c.owners(hashes, 0)
        c.peers[busy].load, c.peers[free].load = 0.05, 0.01
        assert firsts(c, hashes[0]) == {free: 2000}


def test_of_many_the_loaded_one_is_asked_only_if_it_is_compared_with_none() -> None:
    with cluster(nodes=6, replicas=3) as c:
        hashes = c.chain(16, where=not_ours)
        busy, *others = c.owners(hashes, 0)
        c.peers[busy].load = 1.0
        asked = firsts(c, hashes[0])
        assert asked[busy] == 0
        assert max(asked[node] for node in others) < 1.2 * min(asked[node] for node in others)


def test_who_is_not_usable_is_skipped_also_when_that_shows_late() -> None:
    with cluster(nodes=6, replicas=2) as c:
        hashes = c.chain(16, where=not_ours)
        first, second, third = (c.peers[node] for node in c.owners(hashes, 0))
        first.usable = False
        order = candidates(c).of(hashes[0])
        asked = next(order).peer
        other = third if asked is second else second
        other.usable = False
        assert list(order) == []
        assert asked is not first


def test_who_did_not_answer_comes_last_for_a_while() -> None:
    with cluster(nodes=6, replicas=2) as c:
        hashes = c.chain(16, where=not_ours)
        silent = c.owners(hashes, 0)[0]
        clock = Clock()
        order = Candidates(c.rings, c.seen, hints=c.hints, clock=clock, random=Random(1))
        order.avoid(silent)
        for _ in range(20):
            assert [one.peer.node for one in order.of(hashes[0])][2] == silent
        clock.now += 1.0
        assert silent in {next(order.of(hashes[0])).peer.node for _ in range(40)}


def test_extra_owners_take_their_share_of_a_hot_segment() -> None:
    with cluster(nodes=8, replicas=0) as c:
        hashes = c.chain(16, where=not_ours)
        extra = extra_owners(c.rings.ring, hashes[0], 4)
        c.hints.note({hashes[0]: 4})
        asked = firsts(c, hashes[0], reads=4000)
        assert set(asked) == {*c.owners(hashes, 0), *extra} - {"n0"}
        assert max(asked.values()) < 1.2 * min(asked.values())


def test_a_hint_of_more_extra_owners_than_nodes_is_harmless() -> None:
    with cluster(nodes=4, replicas=0) as c:
        hashes = c.chain(16, where=not_ours)
        c.hints.note({hashes[0]: 10**9})
        assert {one.peer.node for one in islice(candidates(c).of(hashes[0]), 10)} == {"n1", "n2", "n3"}
