"""A server that drains asks its clients to leave: what runs is finished, the next call goes elsewhere, none
fails.
"""

import asyncio

import pytest

from cachemgr.cluster.bulk.frames import PeerTrouble
from cachemgr.cluster.bulk.opening import BulkDoor
from cachemgr.cluster.bulk.server import BulkServer
from tests.cachemgr.cluster.bulk.pair import (
    BIG,
    OWNER,
    READER,
    FixedRings,
    Pair,
    addresses,
    fill,
    pair,
    run,
    settings,
    whole,
)
from tests.cachemgr.host import FORMAT, Host, chain


def next_server(p: Pair, *, same_host: bool) -> BulkServer:
    """As the owner's next process would start it."""
    return BulkServer(
        {p.owner.store.format_id: p.owner.store}.get, tickets=p.tickets, rings=FixedRings(OWNER),
        settings=settings(same_host=same_host),
    )  # fmt: skip


@pytest.mark.parametrize("same_host", [False, True], ids=["socket", "arena"])
def test_under_load_no_call_fails(host: Host, same_host: bool) -> None:
    async def test() -> None:
        ports: list[int] = []

        def newest(door: BulkDoor) -> BulkDoor:
            return BulkDoor(door.host, ports[-1] if ports else door.port, door.ticket, same_host, tls=False)

        async with pair(host, blocks=200, same_host=same_host, door=newest) as p:
            names, given = chain(p.owner.cache, 100), chain(p.reader.cache, 40, seed=1)
            fill(p.owner, names, FORMAT)
            fill(p.reader, given, FORMAT)
            stop = False
            calls = 0

            async def load(number: int) -> None:
                nonlocal calls
                while not stop:
                    part = addresses(names)[number * 10 : number * 10 + 10]
                    assert (await p.get(part)).arrived == (True,) * 10
                    assert await p.put(given[number * 4 : number * 4 + 4]) == [True] * 4
                    calls += 2

            loads = [asyncio.create_task(load(number)) for number in range(10)]
            servers = [p.server]
            for _ in range(4):
                server = next_server(p, same_host=same_host)
                ports.append(await server.start("127.0.0.1"))
                servers.append(server)
                before = calls
                async with asyncio.timeout(20):
                    await servers[-2].drain()
                    while calls < before + 60:
                        await asyncio.sleep(0.001)
                assert not servers[-2]._tasks
            stop = True
            await asyncio.gather(*loads)
            assert len(p.doors) == 5
            await p.client.close()
            await servers[-1].close()

    run(test)


def test_a_transfer_under_way_is_finished(host: Host) -> None:
    async def test() -> None:
        async with pair(host, block_format=BIG, blocks=20) as p:
            names = chain(p.owner.cache, 16)
            fill(p.owner, names, BIG)
            await p.get(addresses(names[:1]))
            running = asyncio.create_task(p.get(addresses(names)))
            while not p.server.pinned_nbytes:
                await asyncio.sleep(0)
            async with asyncio.timeout(20):
                await p.server.drain()
            assert (await running).arrived == (True,) * 16
            assert whole(p.reader.store, names, BIG) == 16

    run(test)


def test_a_client_that_does_not_leave_is_closed_in_the_end(host: Host) -> None:
    async def test() -> None:
        async with pair(host, server={"call_s": 0.2}) as p:
            reader, writer = await asyncio.open_connection("127.0.0.1", p.port)
            from cachemgr.cluster.bulk.hello import Hello, pack_hello

            writer.write(pack_hello(Hello((1, 2), p.tickets.issue(READER), READER)))
            while not p.server._connections:
                await asyncio.sleep(0.001)
            async with asyncio.timeout(20):
                await p.server.drain()
                await reader.read()
            writer.close()
            await writer.wait_closed()

    run(test)


def test_who_comes_after_is_refused(host: Host) -> None:
    async def test() -> None:
        async with pair(host) as p:
            await p.server.drain()
            with pytest.raises(PeerTrouble) as caught:
                await p.get(addresses(chain(p.owner.cache, 2)))
            assert caught.value.kind == "refused"

    run(test)


def test_a_closed_client_refuses(host: Host) -> None:
    async def test() -> None:
        async with pair(host) as p:
            await p.client.close()
            await p.client.close()
            with pytest.raises(PeerTrouble):
                await p.get(addresses(chain(p.owner.cache, 2)))

    run(test)
