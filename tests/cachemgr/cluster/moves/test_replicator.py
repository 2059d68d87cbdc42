"""Committed blocks come to every owner that the ring names, within bounds, and are counted."""

import asyncio

import pytest

from cachemgr.cluster.moves.replication_lane import TRIES
from cachemgr.ring import NodeSpec, add_node, drain_node, position_of
from tests.cachemgr.cluster.moves.cluster import Cluster, spec
from tests.cachemgr.cluster.moves.doubles import NBYTES, chain
from tests.cachemgr.cluster.moves.virtual_time import run


@pytest.mark.parametrize("replicas", range(4))
@pytest.mark.parametrize("nodes", ["a", "ab", "abc", "abcdef"])
def test_every_owner_has_every_block(nodes: str, replicas: int) -> None:
    async def main() -> None:
        cluster = Cluster(nodes, background=False, replicas=replicas)
        await cluster.fill(prompts=20)
        copies = min(len(nodes), 1 + replicas)
        for address in cluster.committed:
            owners = cluster.owners(address)
            assert cluster.holders(address) == {str(owner.node) for owner in owners}
            assert len(owners) == copies
            assert len(owners[0].copies[address.hash]) == copies
        await cluster.close()

    run(main)


def test_copies_are_in_distinct_domains_and_counted_by_them() -> None:
    def in_pairs(name: str) -> NodeSpec:
        return spec(name, domain={"a": "left", "b": "left"}.get(name, "right"))

    async def main() -> None:
        cluster = Cluster("abcd", background=False, specs=in_pairs)
        await cluster.fill(prompts=20)
        for address in cluster.committed:
            domains = {"left" if name in "ab" else "right" for name in cluster.holders(address)}
            assert domains == {"left", "right"}
        counters = [node.replicator.counters() for node in cluster.live()]
        for n, expected in ((1, 80), (2, 80), (3, 0)):
            assert sum(each[f"cluster_committed{n}_blocks_total"] for each in counters) == expected
        assert sum(each["cluster_replicated_blocks_total"] for each in counters) == 80
        await cluster.close()

    run(main)


def test_two_nodes_of_one_domain_are_one_commit() -> None:
    async def main() -> None:
        cluster = Cluster("ab", background=False, specs=lambda name: spec(name, domain="one"))
        (address, *_) = cluster.commit(1)
        node = cluster.owners(address)[0]
        await cluster.until(lambda: node.replicator.idle)
        assert len(cluster.holders(address)) == 2
        assert node.copies[address.hash] == {"one"}
        await cluster.close()

    run(main)


def test_a_writer_that_owns_nothing_keeps_a_surplus_copy() -> None:
    async def main() -> None:
        cluster = Cluster("abcd", background=False)
        hashes = chain(7, 4)
        owners = cluster["a"].rings.ring.owners(position_of(hashes[0]), 2)
        writer = next(name for name in "abcd" if name not in owners)
        (address, *_) = cluster.commit(7, at=writer)
        await cluster.until(lambda: cluster[writer].replicator.idle)
        assert cluster.holders(address) == {writer, *owners}
        assert cluster[writer].copies[address.hash] == {writer, *owners}
        await cluster.close()

    run(main)


def test_many_blocks_go_in_one_put_and_peers_do_not_wait_for_each_other() -> None:
    async def main() -> None:
        cluster = Cluster("abc", background=False, replicas=2)
        cluster.commit(1, 200, at="a")
        await cluster.until(lambda: cluster["a"].replicator.idle)
        puts = [call for call in cluster.wire.calls if call[3] == "put"]
        assert sum(call[4] for call in puts) == 400
        assert max(call[4] for call in puts) * NBYTES <= 4 << 20
        assert len(puts) <= 10
        assert puts[0][0] == puts[1][0], "the second peer waited for the first"
        await cluster.close()

    run(main)


def test_more_than_the_queue_takes_is_dropped_and_counted() -> None:
    async def main() -> None:
        cluster = Cluster("ab", background=False, queue_blocks=10)
        cluster.commit(1, 25, at="a")
        counters = cluster["a"].replicator.counters()
        assert counters["cluster_replication_queue"] == 10
        assert counters["cluster_replication_dropped_total"] == 15
        await cluster.until(lambda: cluster["a"].replicator.idle)
        assert cluster["a"].replicator.counters()["cluster_replication_queue"] == 0
        assert len(cluster["b"].store.blocks) == 10
        cluster.commit(2, 5, at="a")
        await cluster.until(lambda: cluster["a"].replicator.idle)
        assert len(cluster["b"].store.blocks) == 15, "there is room again"
        await cluster.close()

    run(main)


def test_an_owner_that_refuses_is_asked_a_bounded_number_of_times() -> None:
    async def main() -> None:
        cluster = Cluster("ab", background=False)
        cluster.wire.refuse_puts.add(cluster["b"].node)
        cluster.commit(1, 4, at="a")
        await cluster.until(lambda: cluster["a"].replicator.idle)
        assert sum(call[4] for call in cluster.wire.calls if call[3] == "put") == 4 * TRIES
        assert cluster["a"].replicator.counters()["cluster_replication_failed_total"] == 4
        await cluster.close()

    run(main)


def test_an_owner_that_refuses_for_a_moment_gets_its_blocks() -> None:
    async def main() -> None:
        cluster = Cluster("ab", background=False)
        cluster.wire.refuse_puts.add(cluster["b"].node)
        cluster.commit(1, 4, at="a")
        await cluster.until(lambda: any(call[3] == "put" for call in cluster.wire.calls))
        cluster.wire.refuse_puts.clear()
        await cluster.until(lambda: cluster["a"].replicator.idle)
        assert cluster.placed()
        assert cluster["a"].replicator.counters()["cluster_replication_failed_total"] == 0
        await cluster.close()

    run(main)


def test_a_dead_owner_does_not_hold_up_the_others() -> None:
    async def main() -> None:
        cluster = Cluster("abc", background=False, replicas=2, queue_blocks=100)
        cluster["c"].kill()
        for seed in range(40):
            cluster.commit(seed, 4, at="a")
            await cluster.until(lambda: cluster["a"].replicator.counters()["cluster_replication_queue"] < 90)
        await cluster.until(lambda: cluster["a"].replicator.idle)
        assert len(cluster["b"].store.blocks) == 160
        assert cluster["a"].replicator.counters()["cluster_replication_failed_total"] == 160
        await cluster.close()

    run(main)


def test_what_waits_goes_to_the_owners_of_a_new_ring() -> None:
    async def main() -> None:
        cluster = Cluster("abc", background=False)
        cluster.wire.refuse_puts.update(node.node for node in cluster.live())
        for seed in range(20):
            cluster.commit(seed, 4, at="a")
        cluster.install(drain_node(cluster.state, "b"))
        cluster.wire.refuse_puts.clear()
        await cluster.until(lambda: cluster["a"].replicator.idle)
        assert cluster.placed()
        assert not cluster["b"].store.blocks
        await cluster.close()

    run(main)


def test_a_store_that_goes_away_is_left_alone() -> None:
    async def main() -> None:
        cluster = Cluster("ab", background=False)
        node = cluster["a"]
        cluster.commit(1, 100, at="a")
        await cluster.until(lambda: cluster["b"].store.blocks)
        await node.replicator.forget(node.store)  # type: ignore[arg-type]
        assert node.replicator.idle
        calls = len(cluster.wire.calls)
        await cluster.until(lambda: len(cluster.wire.calls) >= calls, limit_s=5)
        assert sum(call[3] == "put" for call in cluster.wire.calls[calls:]) == 0
        await cluster.close()

    run(main)


def test_a_new_ring_while_it_closes_starts_nothing() -> None:
    async def main() -> None:
        cluster = Cluster("abc", background=False)
        replicator = cluster["a"].replicator
        for seed in range(20):
            cluster.commit(seed, 4, at="a")
        closing = asyncio.create_task(replicator.close())
        await asyncio.sleep(0)
        cluster.install(add_node(drain_node(cluster.state, "b"), spec("d")))
        await closing
        assert replicator.idle
        assert not replicator._lanes
        await cluster.close()

    run(main)
