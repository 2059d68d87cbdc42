"""A slow or stopped reader costs only its own connection; beyond the bounds requests wait in order or hear
"busy".
"""

import asyncio
import socket
import struct
from collections.abc import Callable

import pytest

from cachemgr.cluster.bulk import server_connection
from cachemgr.cluster.bulk.frames import (
    ABSENT,
    ACK,
    BLOCK,
    END,
    FROM_SERVER,
    GET,
    HEAD_NBYTES,
    PUT,
    WANT,
    PeerTrouble,
    pack_frame,
    pack_head,
    parse_head,
)
from cachemgr.cluster.bulk.hello import WELCOME_NBYTES, Hello, pack_hello
from cachemgr.cluster.bulk.messages import Ended, Request, decode, encode, join_names
from cachemgr.cluster.bulk.send_budget import SendBudget
from cachemgr.cluster.bulk.server_connection import REQUESTS
from cachemgr.cluster.bulk.transfer_leases import TransferLeases
from cachemgr.contract import BlockHash
from cachemgr.ring import NodeId
from tests.cachemgr.cluster.bulk.pair import BIG, Pair, addresses, assert_idle, fill, pair, run, whole
from tests.cachemgr.host import FORMAT, Host, chain

OTHER = NodeId("other")


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


class RawClient:
    """A connection of another node that a test drives frame by frame."""

    def __init__(self, p: Pair) -> None:
        self._pair = p
        self._sock = socket.socket()

    async def open(self) -> "RawClient":
        loop = asyncio.get_running_loop()
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._sock.setblocking(False)
        await loop.sock_connect(self._sock, ("127.0.0.1", self._pair.port))
        await self.say(pack_hello(Hello((1, 2), self._pair.tickets.issue(OTHER), OTHER)))
        await self._exactly(WELCOME_NBYTES)
        return self

    async def say(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._sock, data)

    async def ask(self, number: int, names: list[BlockHash], *, kind: int = GET) -> None:
        version = self._pair.owner_rings.ring.version
        format_id = self._pair.owner.store.format_id
        request = Request(format_id, version.epoch, version.digest, 10_000, join_names(names))
        await self.say(pack_frame(kind, number, encode(request)))

    async def frame(self) -> tuple[int, int, bytes]:
        """Kind, request, body."""
        head = parse_head(await self._exactly(HEAD_NBYTES), FROM_SERVER)
        return head.kind, head.request, await self._exactly(head.length)

    async def ended(self, number: int) -> str:
        """Read until this request has ended; its status."""
        while True:
            kind, request, body = await self.frame()
            if kind == END and request == number:
                return decode(body, Ended).status

    async def at_end(self) -> bool:
        try:
            async with asyncio.timeout(20):
                while await asyncio.get_running_loop().sock_recv(self._sock, 65536):
                    pass
        except ConnectionError:
            pass
        return True

    def close(self) -> None:
        self._sock.close()

    async def _exactly(self, count: int) -> bytes:
        data = b""
        async with asyncio.timeout(20):
            while len(data) < count:
                part = await asyncio.get_running_loop().sock_recv(self._sock, count - len(data))
                assert part, "closed"
                data += part
        return data


def test_a_stopped_reader_loses_its_connection_and_its_pins_and_nobody_else_does(host: Host) -> None:
    async def test() -> None:
        async with pair(host, block_format=BIG, blocks=40, server={"lease_s": 0.3}) as p:
            names = chain(p.owner.cache, 32)
            fill(p.owner, names, BIG)
            stopped = await RawClient(p).open()
            await stopped.ask(1, names)  # 16 MiB: more than sockets take
            await until(lambda: p.owner.cache.counters()["cache_pins"])
            fetched = await p.get(addresses(names[:4]))
            assert fetched.arrived == (True,) * 4
            await until(lambda: p.server.leases.expired)
            assert_idle(p.owner)
            assert await stopped.at_end()
            stopped.close()
            assert (await p.get(addresses(names))).arrived == (True,) * 32
            assert whole(p.reader.store, names, BIG) == 32

    run(test)


def test_a_slow_reader_keeps_its_connection_as_long_as_there_is_progress(host: Host) -> None:
    async def test() -> None:
        async with pair(host, block_format=BIG, blocks=20, server={"lease_s": 1.0}) as p:
            names = chain(p.owner.cache, 16)
            fill(p.owner, names, BIG)
            slow = await RawClient(p).open()
            await slow.ask(1, names)
            for _ in range(13):  # longer than the lease
                await slow.frame()
                await asyncio.sleep(0.1)
            assert await slow.ended(1) == "done"
            slow.close()

    run(test)


def test_a_put_that_stands_still_gives_its_slot_back(host: Host) -> None:
    async def test() -> None:
        async with pair(host, server={"lease_s": 0.3}) as p:
            names = chain(p.reader.cache, 2)
            fill(p.reader, names, FORMAT)
            stopped = await RawClient(p).open()
            await stopped.ask(1, names, kind=PUT)
            assert (await stopped.frame())[0] == WANT
            held = p.reader.hold_one(names[0])
            body = struct.pack("<I", 0) + held.header + bytes(held.payload)
            p.reader.store.let_go([held])
            await stopped.say(pack_head(BLOCK, 1, len(body)) + body[:-1])
            reserved = p.owner.cache._tier.table._state.index._reserved
            await until(lambda: reserved)
            await until(lambda: not reserved)
            assert await stopped.at_end()
            stopped.close()
            assert await p.put(names) == [True, True]

    run(test)


def test_a_put_may_lose_blocks_on_the_way(host: Host) -> None:
    async def test() -> None:
        async with pair(host) as p:
            raw = await RawClient(p).open()
            await raw.ask(1, chain(p.owner.cache, 3), kind=PUT)
            assert await raw.frame() == (WANT, 1, struct.pack("<3I", 0, 1, 2))
            await raw.say(pack_frame(ABSENT, 1, struct.pack("<II", 0, 3)))
            assert [await raw.frame() for _ in range(3)] == [
                (ACK, 1, struct.pack("<IB", index, 0)) for index in range(3)
            ]
            assert await raw.ended(1) == "done"
            raw.close()

    run(test)


def test_too_many_requests_on_a_connection_hear_busy(host: Host) -> None:
    async def test() -> None:
        async with pair(host, block_format=BIG, blocks=20) as p:
            names = chain(p.owner.cache, 16)
            fill(p.owner, names, BIG)
            greedy = await RawClient(p).open()
            for number in range(REQUESTS + 8):
                await greedy.ask(number, names)
            await until(lambda: len(next(iter(p.server._connections))._work) == REQUESTS)
            assert p.server.pinned_nbytes <= 256 << 20
            assert p.owner.cache.counters()["cache_pins"] <= 16 * REQUESTS
            statuses = [await greedy.ended(number) for number in range(REQUESTS, REQUESTS + 8)]
            assert "busy" in statuses
            greedy.close()

    run(test)


def test_who_asks_on_and_reads_nothing_is_cut_off(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_connection, "UNREAD_NBYTES", 1 << 16)

    async def test() -> None:
        async with pair(host) as p:
            assert p.server._listener is not None
            p.server._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            deaf = await RawClient(p).open()
            unknown = encode(Request(bytes(16), 1, bytes(16), 1000, bytes(16)))

            async def ask_on() -> None:
                async with asyncio.timeout(10):
                    while True:
                        await deaf.say(pack_frame(GET, 1, unknown) * 100)

            with pytest.raises(ConnectionError):
                await ask_on()
            deaf.close()

    run(test)


def test_when_all_bytes_are_pinned_requests_wait_and_then_hear_busy(host: Host) -> None:
    async def test() -> None:
        async with pair(host, block_format=BIG, blocks=20, pinned_nbytes=8 << 20) as p:
            names = chain(p.owner.cache, 16)
            fill(p.owner, names, BIG)
            stopped = await RawClient(p).open()
            await stopped.ask(1, names)
            await until(lambda: p.server.pinned_nbytes == 8 << 20)
            with pytest.raises(PeerTrouble) as caught:
                await p.get(addresses(names[:2]), seconds=0.3)
            assert caught.value.kind in ("busy", "silent")
            waiting = asyncio.ensure_future(p.get(addresses(names[:2])))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            stopped.close()
            assert (await waiting).arrived == (True, True)

    run(test)


def test_the_budget_serves_in_order_and_bounds_who_waits() -> None:
    async def test() -> None:
        budget = SendBudget(10, waiters=3, loop=asyncio.get_running_loop())
        served: list[str] = []

        def wish(name: str, nbytes: int, seconds: float = 30.0) -> object:
            return budget.wait(
                nbytes,
                seconds=seconds,
                granted=lambda: served.append(name),
                refused=lambda: served.append("no " + name),
            )

        assert budget.take(8)
        assert not budget.take(3)
        assert wish("a", 9)
        assert not budget.take(1)  # nobody overtakes
        assert wish("b", 1, seconds=0.01)
        assert wish("c", 99)  # all there is
        assert wish("d", 1) is None
        await until(lambda: served)
        assert served == ["no b"]
        budget.give_back(8)
        assert (served, budget.used) == (["no b", "a"], 9)
        budget.give_back(9)
        assert (served, budget.used) == (["no b", "a", "c"], 10)
        budget.give_back(99)
        assert budget.used == 0

    run(test)


def test_leases_run_out_without_progress_and_only_then() -> None:
    async def test() -> None:
        leases = TransferLeases(0.1, loop=asyncio.get_running_loop())
        gone: list[str] = []
        renewed = leases.grant(lambda: gone.append("renewed"))
        leases.grant(lambda: gone.append("idle"))
        ended = leases.grant(lambda: gone.append("ended"))
        ended.end()
        ended.end()
        for _ in range(6):
            await asyncio.sleep(0.03)
            renewed.renew()
        assert gone == ["idle"]
        await until(lambda: len(gone) == 2)
        assert gone == ["idle", "renewed"]
        renewed.renew()  # too late
        assert len(leases) == 0
        assert leases.expired == 2
        leases.close()

    run(test)
