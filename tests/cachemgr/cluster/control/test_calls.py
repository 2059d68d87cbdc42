"""Every call of a peer over real gRPC: what it brings, what is checked, how often a connection is made."""

import asyncio
from pathlib import Path

import numpy as np

from cachemgr.cluster.control.grpc_service import ask
from cachemgr.cluster.control.messages import STATUS, StatusRequest
from cachemgr.cluster.control.packed import MAX_NAMES
from cachemgr.contract import BlockHash
from tests.cachemgr.cluster.control.nodes import CLUSTER, cluster, run
from tests.cachemgr.cluster.control.stores import FORMAT, DictStore, chain, lone_blocks

WHOLE = (np.array([0], np.uint64), np.array([2**64 - 1], np.uint64))


def test_lookup_says_where_blocks_stand(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as (a, b):
            blocks = chain("x", 40)
            b.store.blocks.update({block.hash: block for block in blocks[:30]})
            names = [block.hash for block in blocks]
            found = await a.to(b).lookup(FORMAT, names, deadline=a.within())
            assert found == [*blocks[:30], *[None] * 10]
            assert await a.to(b).lookup(b"g" * 16, names, deadline=a.within()) == [None] * 40
            assert await a.to(b).lookup(b"", names[:1], deadline=a.within()) == blocks[:1]
            assert await a.to(b).lookup(FORMAT, [], deadline=a.within()) == []
            assert b.store.held == 0

    run(test)


def test_many_names_go_in_parts(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as (a, b):
            blocks = lone_blocks("x", 2 * MAX_NAMES + 5)
            b.store.blocks.update({block.hash: block for block in blocks})
            names = [block.hash for block in blocks]
            assert await a.to(b).lookup(FORMAT, names, deadline=a.within()) == blocks
            assert b.control.calls["Lookup"] == 3
            assert b.store.most_held_at_once <= 128
            assert await a.to(b).moved(FORMAT, names, deadline=a.within())
            assert [(node, kind, len(some)) for node, kind, some in b.moved] == [
                ("a", FORMAT, MAX_NAMES), ("a", FORMAT, MAX_NAMES), ("a", FORMAT, 5),
            ]  # fmt: skip
            assert [name for _, _, some in b.moved for name in some] == names

    run(test)


def test_arcs_are_listed_in_parts_with_one_look(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as (a, b):
            blocks = [*lone_blocks("x", 2 * MAX_NAMES), *chain("y", 64)]
            b.store.blocks.update({block.hash: block for block in blocks})
            listed, cursor, parts = [], b"", 0
            while parts == 0 or cursor:
                part = await a.to(b).list_arcs(FORMAT, *WHOLE, after=cursor, deadline=a.within())
                assert part is not None
                assert len(part[0]) <= MAX_NAMES
                listed, cursor, parts = listed + part[0], part[1], parts + 1
            assert parts == 3
            assert b.store.looks == 1
            assert sorted(block.hash for block in listed) == sorted(block.hash for block in blocks)
            assert len(set(listed)) == len(listed)
            places = [(block.segment, block.index) for block in listed]
            assert places == sorted(places)

    run(test)


def test_a_listing_goes_on_where_it_was_though_blocks_come_and_go(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as (a, b):
            blocks = sorted(lone_blocks("x", MAX_NAMES + 100), key=lambda block: block.segment)
            b.store.blocks.update({block.hash: block for block in blocks})
            first = await a.to(b).list_arcs(FORMAT, *WHOLE, after=b"", deadline=a.within())
            assert first is not None
            for block in blocks[: MAX_NAMES + 1]:  # what the cursor names and what comes next is gone
                del b.store.blocks[block.hash]
            narrower = (WHOLE[0], np.array([2**64 - 2], np.uint64))  # nobody remembers a listing of these
            second = await a.to(b).list_arcs(FORMAT, *narrower, after=first[1], deadline=a.within())
            assert second == (blocks[MAX_NAMES + 1 :], b"")

    run(test)


def test_only_what_lies_in_the_arcs_is_listed(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as (a, b):
            blocks = lone_blocks("x", 200)
            b.store.blocks.update({block.hash: block for block in blocks})
            arcs = (np.array([0, 2**63], np.uint64), np.array([2**62, 2**63 + 2**62], np.uint64))
            part = await a.to(b).list_arcs(FORMAT, *arcs, after=b"", deadline=a.within())
            assert part is not None
            assert set(part[0]) == set(b.store.resident(*arcs))
            assert 0 < len(part[0]) < 200
            assert await a.to(b).list_arcs(b"g" * 16, *arcs, after=b"", deadline=a.within()) == ([], b"")

    run(test)


def test_a_door_opens_once_for_the_node_that_asked(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as (a, b):
            blocks = chain("x", 3)
            b.store.blocks.update({block.hash: block for block in blocks[:2]})
            fetched = await a.to(b).get(a.store, blocks, deadline=a.within())  # type: ignore[arg-type]
            assert fetched.arrived == (True, True, False)
            names = [block.hash for block in blocks[:2]]
            b.store.blocks.clear()
            assert await a.to(b).put(a.store, names, deadline=a.within()) == [True, True]  # type: ignore[arg-type]
            first, second = a.bulks[b.id].doors
            assert (first.host, first.port, first.same_host, first.tls) == ("127.0.0.1", b.port, True, False)
            assert first.ticket != second.ticket
            assert not b.tickets.redeem(first.ticket, a.id)

    run(test)


def test_one_hello_for_many_calls_at_once(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as (a, b):
            assert await a.to(b).lookup(FORMAT, [], deadline=a.within()) == []
            assert b.control.calls == {}
            names = [block.hash for block in chain("x", 2)]
            await asyncio.gather(*(a.to(b).lookup(FORMAT, names, deadline=a.within()) for _ in range(50)))
            assert b.control.calls == {"Hello": 1, "Lookup": 50}

    run(test)


def test_a_call_beyond_its_deadline_is_not_made(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as (a, b):
            assert await a.to(b).exchange_ring(deadline=a.within()) == a.rings.version
            names = [BlockHash(bytes(16))]
            assert await a.to(b).lookup(FORMAT, names, deadline=a.time() - 1) == [None]
            assert "Lookup" not in b.control.calls
            assert a.to(b).troubles == {"deadline": 1}
            assert a.to(b).usable

    run(test)


def test_answers_that_do_not_fit_the_question_are_misses(tmp_path: Path) -> None:
    class OtherBlocks(DictStore):
        def hold(self, names: object) -> list:  # type: ignore[type-arg]
            return super().hold(list(self.blocks))

    async def test() -> None:
        async with cluster(tmp_path) as (a, b):
            blocks = chain("x", 2)
            b.store.__class__ = OtherBlocks
            b.store.blocks[blocks[0].hash] = blocks[0]
            assert await a.to(b).lookup(FORMAT, [blocks[1].hash], deadline=a.within()) == [None]
            assert a.to(b).troubles == {"garbage": 1}

    run(test)


def test_a_person_can_ask_from_where_no_loop_runs(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as (a, b):
            await a.to(b).exchange_ring(deadline=a.within())
            status = await asyncio.to_thread(
                ask, a.spec.address, STATUS, StatusRequest(cluster=CLUSTER), timeout_s=10.0
            )
            assert status.status.node == "a"
            assert [(member.node, member.state) for member in status.status.members] == [("b", "closed")]
            assert status.ring == a.rings.encoded
            assert status.version == a.rings.version

    run(test)
