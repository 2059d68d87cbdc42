"""A thousand gets and puts while connections are cut at random: bytes are right, and nothing is left over."""

import asyncio
import random
import socket
import struct

import pytest

from cachemgr.cluster.bulk.frames import PeerTrouble
from cachemgr.cluster.bulk.opening import BulkDoor
from cachemgr.contract import BlockHash
from tests.cachemgr.cluster.bulk.pair import MEDIUM, addresses, assert_idle, fill, pair, run, whole
from tests.cachemgr.host import Host, chain

GETS = 1000
CHAIN = 6


class Cutter:
    """A proxy that resets each connection after a random number of bytes."""

    def __init__(self, port: int, *, numbers: random.Random) -> None:
        self._port = port
        self._numbers = numbers
        self._tasks: set[asyncio.Task[None]] = set()
        self.cuts = 0

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        limit = [int(self._numbers.expovariate(1 / 3e6))]
        ways = [
            asyncio.create_task(self._copy(reader, far_writer, limit)),
            asyncio.create_task(self._copy(far_reader, writer, limit)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            self.cuts += 1
        except asyncio.CancelledError:
            pass  # the test is over
        finally:
            for one in ways:
                one.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for side in (writer, far_writer):
                sock = side.get_extra_info("socket")
                reset = self._numbers.random() < 0.5  # or a polite end
                if reset and not side.transport.is_closing():
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                side.transport.abort()
            self._tasks.discard(task)

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: list[int]
    ) -> None:
        while limit[0] > 0:
            data = await reader.read(min(1 << 16, limit[0]))
            if not data:
                return
            limit[0] -= len(data)
            writer.write(data)
            await writer.drain()


@pytest.mark.parametrize("seed", [1])
def test_bytes_are_right_and_nothing_is_left(host: Host, seed: int) -> None:
    numbers = random.Random(seed)

    async def test() -> None:
        cutters: list[tuple[Cutter, int]] = []

        def through(door: BulkDoor) -> BulkDoor:
            return BulkDoor(door.host, cutters[0][1], door.ticket, same_host=False, tls=False)

        async with pair(host, block_format=MEDIUM, blocks=40, door=through) as p:
            cutter = Cutter(p.port, numbers=numbers)
            cutters.append((cutter, await cutter.start()))
            names = [chain(p.owner.cache, CHAIN, seed=number) for number in range(4)]
            given = chain(p.reader.cache, 4, seed=9)
            for one in names:
                fill(p.owner, one, MEDIUM)
            fill(p.reader, given, MEDIUM)
            asked = arrived = troubles = acknowledged = 0
            kinds: set[str] = set()

            async def get(one: list[BlockHash]) -> None:
                nonlocal asked, arrived, troubles, acknowledged
                while asked < GETS:
                    asked += 1
                    some = sorted(numbers.sample(range(CHAIN), numbers.randint(1, 3)))
                    try:
                        if numbers.random() < 0.1:
                            taken = sum(await p.put(given))
                            acknowledged += taken
                            p.owner.store.drop(given)
                            continue
                        fetched = await p.get([addresses(one)[index] for index in some])
                        assert all(fetched.arrived)
                        arrived += len(some)
                    except PeerTrouble as trouble:
                        kinds.add(trouble.kind)
                        troubles += 1
                    if asked % 10 == 0:
                        whole(p.reader.store, one, MEDIUM)
                    p.reader.store.drop(one)

            await asyncio.gather(*map(get, names))
            assert troubles > 5
            assert kinds <= {"broken", "refused"}
            assert cutter.cuts > 5
            assert arrived > GETS // 2
            assert acknowledged > 0
            await p.client.close()
            await cutter.close()
            await p.server.close()
            assert_idle(p.reader, p.owner)

    run(test)
