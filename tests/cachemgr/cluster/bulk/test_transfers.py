"""Blocks travel whole, in the order asked, whatever their size and however they go."""

import asyncio
from contextlib import suppress

import pytest

from cachemgr import BlockFormat, CacheSecrets
from cachemgr.cluster.bulk.frames import PeerTrouble
from tests.cachemgr.cluster.bulk.pair import BIG, HUGE, addresses, after, fill, pair, run, whole
from tests.cachemgr.host import FORMAT, Host, chain
from tests.cachemgr.node import open_node

FORMATS = pytest.mark.parametrize("block_format", [FORMAT, BIG, HUGE], ids=["tiny", "half MiB", "5 MiB"])
WAYS = pytest.mark.parametrize("same_host", [False, True], ids=["socket", "arena"])


@FORMATS
@WAYS
def test_blocks_arrive_whole(host: Host, block_format: BlockFormat, same_host: bool) -> None:
    async def test() -> None:
        async with pair(host, block_format=block_format, blocks=5, same_host=same_host) as p:
            names = chain(p.owner.cache, 3)
            fill(p.owner, names, block_format)
            fetched = await p.get(addresses(names))
            assert fetched.arrived == (True,) * 3
            assert fetched.nbytes == 3 * (128 + block_format.payload_nbytes)
            assert whole(p.reader.store, names, block_format) == 3
            assert p.client.in_place is same_host

    run(test)


@WAYS
def test_what_is_not_there_does_not_arrive(host: Host, same_host: bool) -> None:
    async def test() -> None:
        async with pair(host, same_host=same_host) as p:
            names, others = chain(p.owner.cache, 6), chain(p.owner.cache, 3, seed=1)
            fill(p.owner, names, FORMAT)
            pairs = zip(addresses(names), addresses(others), strict=False)
            asked = [address for both in pairs for address in both]
            fetched = await p.get(asked)
            assert fetched.arrived == (True, False) * 3
            assert whole(p.reader.store, [address.hash for address in asked], FORMAT) == 3
            assert (await p.get(addresses(others))).arrived == (False,) * 3

    run(test)


@WAYS
def test_what_is_here_already_counts_and_stays(host: Host, same_host: bool) -> None:
    async def test() -> None:
        async with pair(host, same_host=same_host) as p:
            names = chain(p.owner.cache, 4)
            fill(p.owner, names, FORMAT)
            for _ in range(2):
                assert (await p.get(addresses(names))).arrived == (True,) * 4
            assert whole(p.reader.store, names, FORMAT) == 4

    run(test)


@WAYS
def test_without_room_the_rest_is_a_miss_and_the_connection_stays(host: Host, same_host: bool) -> None:
    async def test() -> None:
        reader = open_node(host, "reader", blocks=2)
        async with pair(host, reader=reader, same_host=same_host) as p:
            mine = chain(p.reader.cache, 2, seed=5)
            fill(p.reader, mine, FORMAT)
            held = p.reader.store.hold(mine)  # nothing may go
            names = chain(p.owner.cache, 9)
            fill(p.owner, names, FORMAT)
            assert (await p.get(addresses(names))).arrived == (False,) * 9
            p.reader.store.let_go([shard for shard in held if shard])
            assert sum((await p.get(addresses(names))).arrived) >= 2
            assert len(p.doors) == 1

    run(test)


@FORMATS
def test_given_blocks_are_acknowledged(host: Host, block_format: BlockFormat) -> None:
    async def test() -> None:
        async with pair(host, block_format=block_format, blocks=5) as p:
            names = chain(p.reader.cache, 4)
            fill(p.reader, names[:3], block_format)
            assert await p.put(names) == [True, True, True, False]  # the last one is not even here
            assert whole(p.owner.store, names, block_format) == 3
            sent = p.owner.cache.counters()
            assert await p.put(names[:3]) == [True] * 3  # there already: nothing travels
            assert p.owner.cache.counters() == sent

    run(test)


def test_a_block_that_does_not_pass_there_is_not_acknowledged(host: Host) -> None:
    async def test() -> None:
        strange = CacheSecrets(bytes(range(32)), {1: bytes(32)})
        reader = open_node(host, "reader", secrets=strange)
        async with pair(host, reader=reader) as p:
            names = chain(p.reader.cache, 2)
            fill(p.reader, names, FORMAT)
            assert await p.put(names) == [False, False]
            assert whole(p.owner.store, names, FORMAT) == 0
            assert len(p.doors) == 1

    run(test)


def test_without_room_there_a_block_is_not_acknowledged(host: Host) -> None:
    async def test() -> None:
        owner = open_node(host, "owner", blocks=1)
        async with pair(host, owner=owner) as p:
            theirs = chain(p.owner.cache, 1, seed=7)
            fill(p.owner, theirs, FORMAT)
            held = p.owner.store.hold(theirs)
            names = chain(p.reader.cache, 3)
            fill(p.reader, names, FORMAT)
            assert await p.put(names) == [False] * 3
            p.owner.store.let_go([shard for shard in held if shard])

    run(test)


def test_many_requests_share_one_connection(host: Host) -> None:
    async def test() -> None:
        async with pair(host, blocks=400) as p:
            chains = [chain(p.owner.cache, 5, seed=seed) for seed in range(40)]
            for names in chains:
                fill(p.owner, names, FORMAT)
            given = [chain(p.reader.cache, 4, seed=seed) for seed in range(100, 120)]
            for names in given:
                fill(p.reader, names, FORMAT)
            gets = [p.get(addresses(names)) for names in chains]
            puts = [p.put(names) for names in given]
            fetched = await asyncio.gather(*gets)
            assert all(one.arrived == (True,) * 5 for one in fetched)
            assert await asyncio.gather(*puts) == [[True] * 4] * 20
            assert len(p.doors) == 1

    run(test)


def test_more_blocks_than_one_request_may_name(host: Host) -> None:
    async def test() -> None:
        async with pair(host, blocks=2600) as p:
            names = chain(p.owner.cache, 2500)
            fill(p.owner, names, FORMAT)
            assert (await p.get(addresses(names))).arrived == (True,) * 2500
            assert whole(p.reader.store, names, FORMAT) == 2500

    run(test)


def test_a_node_without_the_format_has_nothing(host: Host) -> None:
    async def test() -> None:
        owner = open_node(host, "owner", block_format=BIG, blocks=4)
        async with pair(host, owner=owner) as p:
            names = chain(p.reader.cache, 2)
            assert (await p.get(addresses(names))).arrived == (False, False)
            assert await p.put(names) == [False, False]
            assert len(p.doors) == 1

    run(test)


def test_a_cancelled_get_gives_its_slots_back_and_harms_no_other(host: Host) -> None:
    async def test() -> None:
        async with pair(host, block_format=BIG, blocks=12) as p:
            names = chain(p.owner.cache, 8)
            fill(p.owner, names, BIG)
            await p.get(addresses(names[:1]))
            doomed = asyncio.ensure_future(p.get(addresses(names)))
            for _ in range(4):
                await asyncio.sleep(0)
            doomed.cancel()
            with pytest.raises(asyncio.CancelledError):
                await doomed
            assert (await p.get(addresses(names))).arrived == (True,) * 8
            assert whole(p.reader.store, names, BIG) == 8
            assert len(p.doors) == 1

    run(test)


def test_a_deadline_that_has_passed_brings_nothing(host: Host) -> None:
    async def test() -> None:
        async with pair(host) as p:
            names = chain(p.owner.cache, 2)
            fill(p.owner, names, FORMAT)
            await p.get(addresses(names[:1]))
            with suppress(PeerTrouble):
                fetched = await p.client.get(p.reader.store, addresses(names), deadline=after(-1))
                assert len(fetched.arrived) == 2
            assert (await p.get(addresses(names))).arrived == (True, True)

    run(test)
