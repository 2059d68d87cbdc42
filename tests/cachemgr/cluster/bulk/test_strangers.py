"""Whoever has no ticket gets nothing, and costs next to nothing; who has one and talks nonsense loses his
connection.
"""

import asyncio
import socket
from contextlib import closing, suppress

import pytest

from cachemgr.cluster.bulk import server as bulk_server
from cachemgr.cluster.bulk.frames import (
    BLOCK,
    CANCEL,
    GET,
    LEASE,
    PUT,
    SLICE,
    PeerTrouble,
    pack_frame,
    pack_head,
)
from cachemgr.cluster.bulk.hello import (
    BAD_TICKET,
    WELCOME,
    WELCOME_NBYTES,
    Hello,
    Welcome,
    pack_hello,
    parse_welcome,
)
from cachemgr.cluster.bulk.opening import BulkDoor
from cachemgr.cluster.bulk.tickets import TICKET_S, Tickets
from cachemgr.ring import NodeId
from tests.cachemgr.cluster.bulk.pair import READER, Pair, addresses, fill, pair, run, whole
from tests.cachemgr.host import FORMAT, Clock, Host, chain


async def say(port: int, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    return reader, writer


async def heard(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """All that the server says until it closes."""
    try:
        async with asyncio.timeout(20):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def serves(p: Pair) -> None:
    """An honest client gets his blocks."""
    names = chain(p.owner.cache, 2)
    assert (await p.get(addresses(names))).arrived == (True, True)
    assert whole(p.reader.store, names, FORMAT) == 2


def hello(ticket: bytes, node: NodeId = READER) -> bytes:
    return pack_hello(Hello((1, 2), ticket, node))


@pytest.mark.parametrize(
    "data",
    [b"", b"GET / HTTP/1.1\r\n\r\n" + bytes(200), b"\xff" * 500, hello(bytes(32)), b"TCBK" + b"\xff" * 98],
)
def test_strangers_are_not_let_in(host: Host, data: bytes) -> None:
    async def test() -> None:
        async with pair(host) as p:
            fill(p.owner, chain(p.owner.cache, 2), FORMAT)
            reader, writer = await say(p.port, data)
            if not data:
                writer.write_eof()
            answer = await heard(reader, writer)
            assert answer == b"" or parse_welcome(answer).reason == BAD_TICKET
            await serves(p)

    run(test)


def test_a_ticket_is_good_once_and_for_one_node(host: Host) -> None:
    async def test() -> None:
        async with pair(host) as p:
            fill(p.owner, chain(p.owner.cache, 2), FORMAT)
            await serves(p)
            used = p.doors[0].ticket
            for data in (hello(used), hello(p.tickets.issue(READER), NodeId("other"))):
                assert parse_welcome(await heard(*await say(p.port, data))).reason == BAD_TICKET

    run(test)


def test_a_client_with_a_bad_ticket_hears_so(host: Host) -> None:
    async def test() -> None:
        def worthless(door: BulkDoor) -> BulkDoor:
            return BulkDoor(door.host, door.port, bytes(32), door.same_host, door.tls)

        async with pair(host, door=worthless) as p:
            with pytest.raises(PeerTrouble) as caught:
                await p.get(addresses(chain(p.owner.cache, 2)))
            assert caught.value.kind == "refused"

    run(test)


def test_many_silent_strangers_are_bounded_and_keep_nobody_out(host: Host) -> None:
    async def test() -> None:
        async with pair(host) as p:
            fill(p.owner, chain(p.owner.cache, 2), FORMAT)
            sockets = [socket.create_connection(("127.0.0.1", p.port)) for _ in range(50)]
            try:
                await serves(p)
                assert len(p.server._strangers) <= bulk_server.STRANGERS
                assert len(p.server._tasks) <= bulk_server.STRANGERS + 1
            finally:
                for sock in sockets:
                    sock.close()

    run(test)


def test_a_silent_stranger_is_sent_away(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_server, "HELLO_S", 0.1)

    async def test() -> None:
        async with pair(host) as p:
            assert await heard(*await say(p.port, b"TCBK")) == b""
            assert not p.server._tasks

    run(test)


NONSENSE = {
    "garbage": b"\x99" * 400,
    "a huge length": pack_head(BLOCK, 1, 0xFFFFFFFF),
    "a long request": pack_head(GET, 1, 65537),
    "no request": pack_frame(GET, 1, b"\x00\x01"),
    "a block of no put": pack_head(BLOCK, 1, 133) + bytes(133),
    "a slice of nothing": pack_frame(SLICE, 1, b"x"),
    "a kind of the server's": pack_frame(14, 0),
    "no ring": pack_frame(9, 0, b"[]"),
    "an empty put": pack_frame(PUT, 1, b"\x95\xc4\x00"),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_ends_the_connection_and_no_other(host: Host, name: str) -> None:
    async def test() -> None:
        async with pair(host) as p:
            fill(p.owner, chain(p.owner.cache, 2), FORMAT)
            await serves(p)
            reader, writer = await say(p.port, hello(p.tickets.issue(NodeId("hostile")), NodeId("hostile")))
            answer = await reader.readexactly(WELCOME_NBYTES)
            assert parse_welcome(answer) == Welcome(2, WELCOME, p.owner_rings.node)
            writer.write(NONSENSE[name])
            assert await heard(reader, writer) == b""
            p.reader.store.drop(chain(p.owner.cache, 2))
            await serves(p)
            assert len(p.doors) == 1

    run(test)


def test_what_concerns_no_request_is_ignored(host: Host) -> None:
    async def test() -> None:
        async with pair(host) as p:
            said = hello(p.tickets.issue(NodeId("late")), NodeId("late"))
            said += pack_frame(CANCEL, 7) + pack_frame(LEASE, 8, b"\x01\0\0\0") + pack_frame(8, 0, bytes(32))
            reader, writer = await say(p.port, said)
            writer.write_eof()
            assert len(await heard(reader, writer)) == WELCOME_NBYTES

    run(test)


def test_tickets_expire_and_are_bounded() -> None:
    clock = Clock()
    tickets = Tickets(clock)
    ticket = tickets.issue(READER)
    clock.now += TICKET_S
    assert not tickets.redeem(ticket, READER)
    ticket = tickets.issue(READER)
    clock.now += TICKET_S - 0.01
    assert tickets.redeem(ticket, READER)
    assert not tickets.redeem(ticket, READER)
    first = tickets.issue(READER)
    for _ in range(5000):
        last = tickets.issue(READER)
    assert len(tickets._waiting) <= 4096
    assert not tickets.redeem(first, READER)
    assert tickets.redeem(last, READER)


def test_a_ticket_shown_by_another_node_is_used_up() -> None:
    tickets = Tickets()
    ticket = tickets.issue(READER)
    assert not tickets.redeem(ticket, NodeId("thief"))
    assert not tickets.redeem(ticket, READER)


def test_tickets_are_not_guessed_from_each_other() -> None:
    tickets = Tickets()
    assert len({tickets.issue(READER) for _ in range(1000)}) == 1000
    with closing(socket.socket()):
        assert len(tickets.issue(READER)) == 32
