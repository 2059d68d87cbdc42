"""What the two ends agree on beside bytes: wire versions, rings, hot segments, who reads what."""

import pytest

from cachemgr.cluster.bulk.frames import PeerTrouble
from cachemgr.cluster.bulk.hello import common_version
from cachemgr.ring import NodeSpec, add_node, first_state, remove_node
from tests.cachemgr.cluster.bulk.pair import (
    OWNER,
    READER,
    FixedRings,
    addresses,
    fill,
    pair,
    run,
    whole,
)
from tests.cachemgr.host import FORMAT, Host, chain

STATE = first_state([NodeSpec(READER, "127.0.0.1:1"), NodeSpec(OWNER, "127.0.0.1:2")], replicas=1)
NEWER = add_node(STATE, NodeSpec("third", "127.0.0.1:3"))
WAYS = pytest.mark.parametrize("same_host", [False, True], ids=["socket", "arena"])


@pytest.mark.parametrize(
    ("ours", "theirs", "spoken"),
    [((1, 2), (1, 2), 2), ((1, 2), (1, 1), 1), ((1, 1), (1, 2), 1), ((1, 2), (3, 4), 0), ((2, 3), (1, 2), 2),
     ((1, 2), (0, 0), 0), ((2, 1), (1, 2), 0)],
)  # fmt: skip
def test_the_highest_common_version_is_spoken(
    ours: tuple[int, int], theirs: tuple[int, int], spoken: int
) -> None:
    assert common_version(ours, theirs) == spoken


@pytest.mark.parametrize("versions", [((1, 1), (1, 2)), ((1, 2), (1, 1)), ((1, 1), (1, 1))])
@WAYS
def test_the_version_before_is_spoken(
    host: Host, versions: tuple[tuple[int, int], tuple[int, int]], same_host: bool
) -> None:
    async def test() -> None:
        async with pair(
            host, versions=versions[0], server_versions=versions[1], same_host=same_host, hot=hot
        ) as p:
            names = chain(p.owner.cache, 2)
            hot[names[0]] = 3
            fill(p.owner, names, FORMAT)
            fetched = await p.get(addresses(names))
            assert fetched.arrived == (True, True)
            assert not fetched.hot  # what version 1 does not have
            mine = chain(p.reader.cache, 2, seed=1)
            fill(p.reader, mine, FORMAT)
            assert await p.put(mine) == [True, True]

    hot: dict[bytes, int] = {}
    run(test)


def test_without_a_common_version_there_is_no_peer(host: Host) -> None:
    async def test() -> None:
        async with pair(host, versions=(3, 4)) as p:
            with pytest.raises(PeerTrouble) as caught:
                await p.get(addresses(chain(p.owner.cache, 2)))
            assert caught.value.kind == "versions"
            assert caught.value.arrived == (False, False)

    run(test)


@WAYS
def test_a_stale_reader_gets_the_newer_ring_with_its_answer(host: Host, same_host: bool) -> None:
    async def test() -> None:
        async with pair(host, owner_rings=FixedRings(OWNER, NEWER), same_host=same_host) as p:
            names = chain(p.owner.cache, 2)
            fill(p.owner, names, FORMAT)
            assert (await p.get(addresses(names))).arrived == (True, True)
            assert p.reader_rings.ring.state == NEWER
            await p.get(addresses(names))
            assert len(p.reader_rings.installed) == 1
            newest = remove_node(NEWER, "third")
            p.owner_rings.install(newest)
            await p.put(names)
            assert p.reader_rings.ring.state == newest

    run(test)


def test_a_stale_owner_gets_the_newer_ring_with_the_next_request(host: Host) -> None:
    async def test() -> None:
        async with pair(host, reader_rings=FixedRings(READER, NEWER)) as p:
            names = chain(p.owner.cache, 2)
            for _ in range(2):
                await p.get(addresses(names))
            assert p.owner_rings.ring.state == NEWER
            assert len(p.owner_rings.installed) == 1

    run(test)


@WAYS
def test_hot_segments_travel_with_answers_and_reads_are_counted(host: Host, same_host: bool) -> None:
    async def test() -> None:
        hot: dict[bytes, int] = {}
        async with pair(host, hot=hot, same_host=same_host) as p:
            names = chain(p.owner.cache, 20)
            fill(p.owner, names[:18], FORMAT)
            hot[names[0]] = 2
            fetched = await p.get(addresses(names))
            assert fetched.hot == {names[0]: 2}
            shard = 128 + FORMAT.payload_nbytes
            assert p.reads == [(names[0], 16, 16 * shard), (names[16], 2, 2 * shard)]

    run(test)


def test_a_corrupt_block_is_looked_at_by_its_owner_and_goes(host: Host) -> None:
    async def test() -> None:
        async with pair(host) as p:
            names = chain(p.owner.cache, 3)
            fill(p.owner, names, FORMAT)
            held = p.owner.hold_one(names[1])
            p.owner.cache._tier.holder(held.slot).payload(held.slot)[5] ^= 1  # type: ignore[attr-defined]
            p.owner.store.let_go([held])
            with pytest.raises(PeerTrouble) as caught:
                await p.get(addresses(names))
            assert caught.value.kind == "corrupt"
            assert caught.value.arrived == (True, False, False)
            fetched = await p.get(addresses(names))  # over a new connection
            assert fetched.arrived == (True, False, True)
            assert whole(p.owner.store, names, FORMAT) == 2
            assert len(p.doors) == 2

    run(test)
