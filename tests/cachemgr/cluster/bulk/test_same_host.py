"""Peers of one host read the arena: copied, then checked; whatever happens to it meanwhile is a miss."""

import asyncio
import os
from typing import Any

import pytest

from cachemgr.cluster.bulk import client as bulk_client
from cachemgr.cluster.bulk.client_channel import ClientChannel
from cachemgr.cluster.bulk.frames import PeerTrouble
from cachemgr.cluster.bulk.incoming import Outcome
from cachemgr.cluster.bulk.messages import PlacedFile
from cachemgr.cluster.bulk.same_host import PeerArenas, bring
from tests.cachemgr.cluster.bulk.pair import BIG, addresses, assert_idle, fill, pair, run, whole
from tests.cachemgr.host import FORMAT, Host, chain
from tests.cachemgr.node import open_node


def placed(host: Host, node: str) -> PlacedFile:
    (path,) = (path for path in host.arenas() if node in path.name)
    info = path.stat()
    return PlacedFile(str(path), info.st_dev, info.st_ino)


def test_blocks_are_unpinned_as_soon_as_they_are_copied(host: Host) -> None:
    async def test() -> None:
        async with pair(host, same_host=True) as p:
            names = chain(p.owner.cache, 4)
            fill(p.owner, names, FORMAT)
            assert (await p.get(addresses(names))).arrived == (True,) * 4
            async with asyncio.timeout(20):
                while p.server.pinned_nbytes or len(p.server.leases):
                    await asyncio.sleep(0)
            assert_idle(p.owner)

    run(test)


def test_who_stops_waiting_as_the_answer_comes_lets_go_of_the_blocks(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with pair(host, same_host=True, lease_s=60.0) as p:
            names = chain(p.owner.cache, 4)
            fill(p.owner, names, FORMAT)
            asking = asyncio.create_task(p.get(addresses(names)))
            on_end = ClientChannel._on_end

            def cancelled_then(channel: ClientChannel, *answer: Any) -> None:
                on_end(channel, *answer)
                asking.cancel()

            monkeypatch.setattr(ClientChannel, "_on_end", cancelled_then)
            with pytest.raises(asyncio.CancelledError):
                await asking
            assert p.client._channel is not None
            assert not p.client._channel._reading
            async with asyncio.timeout(20):
                while len(p.server.leases):
                    await asyncio.sleep(0)
            assert_idle(p.owner)

    run(test)


def test_a_setting_turns_it_off_on_either_side(host: Host) -> None:
    async def test() -> None:
        for side in ("client", "server"):
            async with pair(host, same_host=True, **{side: {"same_host": False}}) as p:
                names = chain(p.owner.cache, 2)
                p.owner.store.drop(names)
                fill(p.owner, names, FORMAT)
                assert (await p.get(addresses(names))).arrived == (True, True)
                assert whole(p.reader.store, names, FORMAT) == 2
            p.owner.cache.close()
            p.reader.cache.close()

    run(test)


def test_a_lease_that_ran_out_is_a_miss_and_unpins(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with pair(host, same_host=True, block_format=BIG, blocks=9, lease_s=0.2) as p:
            names, others = chain(p.owner.cache, 8), chain(p.owner.cache, 9, seed=1)
            fill(p.owner, names, BIG)
            await p.get(addresses(names[:1]))
            p.reader.store.drop(names)
            loop = asyncio.get_running_loop()
            copied: list[Outcome] = []

            def slow_bring(*arguments: object) -> Outcome:
                copied.append(bring(*arguments))  # type: ignore[arg-type]
                return copied[-1]

            async def stall() -> None:
                await asyncio.sleep(0.6)  # the reader is paused; meanwhile the owner's lease runs out
                assert_idle(p.owner)
                fill(p.owner, others, BIG)  # and other blocks take the slots

            sleep = asyncio.sleep

            async def paused(seconds: float) -> None:
                monkeypatch.setattr(bulk_client.asyncio, "sleep", sleep)
                await loop.create_task(stall())

            monkeypatch.setattr(bulk_client, "_COPIED_AT_ONCE", 1)
            monkeypatch.setattr(bulk_client, "bring", slow_bring)
            monkeypatch.setattr(bulk_client.asyncio, "sleep", paused)
            fetched = await p.get(addresses(names))
            assert fetched.arrived == (True,) + (False,) * 7
            assert copied == [Outcome.PUBLISHED]
            assert whole(p.reader.store, names, BIG) == 1

    run(test)


def test_a_block_that_changes_while_it_is_copied_is_a_miss(host: Host) -> None:
    owner, reader = open_node(host, "owner", blocks=2), open_node(host, "reader")
    names = chain(owner.cache, 2)
    fill(owner, names, FORMAT)
    held = owner.hold_one(names[0])
    arena = PeerArenas().open(placed(host, "owner"))
    assert arena is not None
    shard = arena.shard(held.place.offset, 128 + FORMAT.payload_nbytes)
    assert shard is not None
    store = reader.store

    class Changing:
        """The reader's store; the owner writes another block into the slot after the header was judged."""

        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

        def reserve(self, address: object) -> object:
            slot = owner.cache._tier.holder(held.slot)
            slot.payload(held.slot)[:] = 0  # type: ignore[attr-defined]
            slot.invalidate(held.slot)  # type: ignore[attr-defined]
            return store.reserve(address)  # type: ignore[arg-type]

    assert bring(Changing(), held.address, shard) is Outcome.NOT_KEPT  # type: ignore[arg-type]
    owner.store.let_go([held])
    assert not reader.has(names[0])
    assert_idle(reader)


def test_only_the_very_file_is_read(host: Host) -> None:
    open_node(host, "owner")
    file = placed(host, "owner")
    arenas = PeerArenas()
    assert arenas.open(file) is not None
    for other in (
        PlacedFile(file.path, file.device, file.inode + 1),
        PlacedFile(file.path, file.device + 1, file.inode),
        PlacedFile(os.path.basename(file.path), file.device, file.inode),
        PlacedFile(f"{host.directory}/../../etc/passwd", file.device, file.inode),
        PlacedFile(f"{host.directory}/gone.arena", file.device, file.inode),
    ):
        assert arenas.open(other) is None
    link = host.directory / "link.arena"
    link.symlink_to(file.path)
    assert arenas.open(PlacedFile(str(link), file.device, file.inode)) is None
    link.unlink()
    strange = host.directory / "strange.arena"
    strange.write_bytes(bytes(4096))
    strange.chmod(0o644)
    info = strange.stat()
    assert arenas.open(PlacedFile(str(strange), info.st_dev, info.st_ino)) is None
    strange.chmod(0o600)
    assert arenas.open(PlacedFile(str(strange), info.st_dev, info.st_ino)) is not None
    arenas.close()
    strange.unlink()


def test_a_file_that_was_cut_is_not_touched(host: Host) -> None:
    path = host.directory / "cut.arena"
    path.write_bytes(bytes(8192))
    path.chmod(0o600)
    info = path.stat()
    arena = PeerArenas().open(PlacedFile(str(path), info.st_dev, info.st_ino))
    assert arena is not None
    assert arena.shard(0, 8192) is not None
    assert arena.shard(128, 8192) is None
    assert arena.shard(64, 128) is None
    os.truncate(path, 4096)
    assert arena.shard(0, 128) is None
    path.unlink()


def test_a_corrupt_block_in_place_is_trouble_and_its_owner_looks(host: Host) -> None:
    async def test() -> None:
        async with pair(host, same_host=True) as p:
            names = chain(p.owner.cache, 3)
            fill(p.owner, names, FORMAT)
            held = p.owner.hold_one(names[1])
            p.owner.cache._tier.holder(held.slot).payload(held.slot)[0] ^= 1  # type: ignore[attr-defined]
            p.owner.store.let_go([held])
            with pytest.raises(PeerTrouble) as caught:
                await p.get(addresses(names))
            assert caught.value.kind == "corrupt"
            assert caught.value.arrived == (True, False, False)
            assert (await p.get(addresses(names))).arrived == (True, False, True)

    run(test)

