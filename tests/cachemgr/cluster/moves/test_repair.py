"""Copies that are missing are made again: after a long absence, after a short one, and by the slow walk."""

import asyncio

from cachemgr.ring import position_of
from tests.cachemgr.cluster.moves.cluster import Cluster
from tests.cachemgr.cluster.moves.doubles import NBYTES
from tests.cachemgr.cluster.moves.virtual_time import clock, run


def _of(cluster: Cluster, name: str) -> list[bytes]:
    """Blocks that a node owns."""
    return [a.hash for a in cluster.committed if any(owner.node == name for owner in cluster.owners(a))]


def test_what_a_node_long_down_should_hold_goes_to_the_next_owners_once() -> None:
    async def main() -> None:
        cluster = Cluster("abcd")
        await cluster.fill()
        cluster["a"].kill()
        await asyncio.sleep(590)
        assert all(len(cluster.holders(address)) == 2 for address in cluster.committed), "too early"
        await asyncio.sleep(60)
        ring = cluster["b"].rings.ring
        for address in cluster.committed:
            live = [n for n in ring.owners(position_of(address.segment), 3) if n != "a"][:2]
            assert cluster.holders(address) - {"a"} == set(live)
        written = [name for node in cluster.live() for name in node.store.written]
        cluster.wire.calls.clear()
        await asyncio.sleep(300)
        lookups = sum(call[3] == "lookup" for call in cluster.wire.calls)
        assert lookups <= 32 * 9, "more than the slow walk asks"
        assert [name for node in cluster.live() for name in node.store.written] == written
        assert not any(call[3] == "put" for call in cluster.wire.calls)
        await cluster.close()

    run(main)


def test_one_of_the_owners_that_are_left_makes_up_for_the_one_that_is_not() -> None:
    async def main() -> None:
        cluster = Cluster("abcd", replicas=2, down_s=20.0)
        await cluster.fill()
        cluster["a"].kill()
        await cluster.until(lambda: any(node.repair._was_down for node in cluster.live()))
        await asyncio.sleep(10)
        cluster.wire.calls.clear()
        await cluster.until(lambda: all(len(cluster.holders(x) - {"a"}) == 3 for x in cluster.committed))
        await asyncio.sleep(5)
        asked = sum(call[4] for call in cluster.wire.calls if call[3] == "lookup")
        walked = 3 * len(cluster.committed) // 2  # in the same time, the slow walk looks at some slices
        assert asked <= 2 * len(_of(cluster, "a")) + walked
        await cluster.close()

    run(main)


def test_with_two_long_down_there_are_two_copies_again() -> None:
    async def main() -> None:
        cluster = Cluster("abcde", replicas=2)
        await cluster.fill()
        cluster["a"].kill()
        cluster["b"].kill()
        await asyncio.sleep(700)
        for address in cluster.committed:
            assert cluster.holders(address) >= {"c", "d", "e"}
        await cluster.close()

    run(main)


def test_a_node_that_is_back_gets_what_it_missed_and_nothing_twice() -> None:
    async def main() -> None:
        cluster = Cluster("abc")
        await cluster.fill()
        kept = set(cluster["a"].store.blocks)
        cluster["a"].kill()
        for seed in range(100, 112):
            cluster.commit(seed, at="b")
        await asyncio.sleep(120)
        cluster["a"].store.written.clear()
        cluster["a"].start()
        await cluster.until(cluster.placed, limit_s=60)
        written = cluster["a"].store.written
        assert sorted(written) == sorted(set(_of(cluster, "a")) - kept)
        await cluster.close()

    run(main)


def test_a_node_that_was_cut_off_and_did_not_restart_gets_what_it_missed() -> None:
    async def main() -> None:
        cluster = Cluster("abc")
        await cluster.fill()
        cluster.wire.cut = {frozenset("ab"), frozenset("ac")}  # type: ignore[arg-type]
        for seed in range(100, 112):
            cluster.commit(seed, at="b")
        await asyncio.sleep(60)
        assert not cluster.placed()
        cluster.wire.cut.clear()
        await cluster.until(cluster.placed, limit_s=60)
        assert len(cluster["a"].store.written) == len(set(cluster["a"].store.written))
        await cluster.close()

    run(main)


def test_back_after_it_was_made_up_for() -> None:
    async def main() -> None:
        cluster = Cluster("abcd")
        await cluster.fill()
        cluster["a"].kill()
        await asyncio.sleep(700)
        cluster["a"].store.written.clear()
        cluster["a"].start()
        await asyncio.sleep(60)
        assert cluster["a"].store.written == [], "its arena survived"
        assert cluster["b"].repair.counters()["cluster_nodes_made_up_for"] == 0
        assert cluster.placed()
        await cluster.close()

    run(main)


def test_the_slow_walk_finds_what_an_owner_lacks() -> None:
    async def main() -> None:
        cluster = Cluster("abcd")
        await cluster.fill()
        lost = cluster.committed[0]
        owners = cluster.owners(lost)
        surplus = next(node for node in cluster.live() if node not in owners)
        surplus.store.take(lost)
        for owner in owners:
            owner.store.drop([lost.hash])
        await cluster.until(cluster.placed, limit_s=700)
        assert lost.hash in surplus.store.blocks, "a surplus copy stays"
        await cluster.close()

    run(main)


def test_repair_keeps_its_rate() -> None:
    async def main() -> None:
        rate = 1 << 20
        cluster = Cluster("abc", copy_bytes_per_s=rate, down_s=10.0)
        await cluster.fill(prompts=60, blocks=16)
        cluster["a"].kill()
        for node in cluster.live():
            node.store.written.clear()
        started = clock()
        await cluster.until(lambda: all(cluster.holders(x) >= {"b", "c"} for x in cluster.committed))
        took = clock() - started - 10
        most = max(NBYTES * len(node.store.written) for node in cluster.live())
        assert most > 8 * rate, "too little to tell"
        assert took >= most / rate - 5
        await cluster.close()

    run(main)
