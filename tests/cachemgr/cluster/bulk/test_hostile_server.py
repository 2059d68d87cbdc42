"""A peer that answers wrongly, by half or not at all costs at most the deadline, and never brings other
bytes.
"""

import asyncio
import struct
import time
from collections.abc import Callable

import pytest

from cachemgr.cluster.bulk.client import BulkClient
from cachemgr.cluster.bulk.frames import (
    ABSENT,
    ACK,
    BLOCK,
    END,
    GOAWAY,
    PLACES,
    RING,
    RUN,
    SLICE,
    WANT,
    PeerTrouble,
    pack_frame,
    pack_head,
)
from cachemgr.cluster.bulk.hello import BAD_TICKET, Welcome, pack_welcome
from cachemgr.cluster.bulk.messages import PlacedFile, Places, encode
from cachemgr.ring import NodeId
from tests.cachemgr.cluster.bulk.hostile import PAYLOAD_AT, block_frame, end_frame, hostile, read_request
from tests.cachemgr.cluster.bulk.pair import BIG, OWNER, addresses, after, assert_idle, fill, run, whole
from tests.cachemgr.host import FORMAT, Host, chain
from tests.cachemgr.node import Node, open_node

BLOCKS = 4
Answer = Callable[[Node, list[bytes], int], bytes]


def block(node: Node, names: list[bytes], request: int, index: int, *, of: int | None = None) -> bytes:
    return block_frame(node, names[index if of is None else of], request=request, index=index)  # type: ignore[arg-type]


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


NO_PLACE = Places((), (-1,), (0,))
ANSWERS: dict[str, tuple[str, Answer]] = {
    "resets in mid-slice": ("broken", lambda o, n, r: block(o, n, r, 1)[:-3]),
    "closes after the head": ("broken", lambda o, n, r: block(o, n, r, 1)[:12]),
    "another block": ("foreign", lambda o, n, r: block(o, n, r, 1, of=2)),
    "wrong tag": ("corrupt", lambda o, n, r: flipped(block(o, n, r, 1), -1) + bytes(0)),
    "wrong byte in the header": ("foreign", lambda o, n, r: flipped(block(o, n, r, 1), PAYLOAD_AT - 104)),
    "wrong bytes under a known tag": ("corrupt", lambda o, n, r: flipped(block(o, n, r, 1), PAYLOAD_AT + 7)),
    "out of order": ("malformed", lambda o, n, r: block(o, n, r, 2)),
    "the same again": ("malformed", lambda o, n, r: block(o, n, r, 0)),
    "an end too early": ("malformed", lambda o, n, r: end_frame(r)),
    "of no request": ("malformed", lambda o, n, r: block(o, n, r + 7, 1)),
    "an end of no request": ("malformed", lambda o, n, r: end_frame(r + 7)),
    "a huge length": ("malformed", lambda o, n, r: pack_head(BLOCK, r, 0xFFFFFFFF)),
    "a block without a header": ("malformed", lambda o, n, r: pack_head(BLOCK, r, 5)),
    "a slice too many": ("malformed", lambda o, n, r: block(o, n, r, 1) + pack_frame(SLICE, r, b"x")),
    "more payload than a block": (
        "malformed",
        lambda o, n, r: pack_head(BLOCK, r, 133 + FORMAT.payload_nbytes) + block(o, n, r, 1)[12:] + b"x",
    ),
    "garbage": ("malformed", lambda o, n, r: b"\xa5" * 64),
    "an unknown kind": ("malformed", lambda o, n, r: pack_frame(99, r)),
    "what only clients say": ("malformed", lambda o, n, r: pack_frame(1, r, b"x")),
    "absent beyond the end": ("malformed", lambda o, n, r: pack_frame(ABSENT, r, RUN.pack(1, 9))),
    "absent out of order": ("malformed", lambda o, n, r: pack_frame(ABSENT, r, RUN.pack(3, 1))),
    "an ack of a get": ("malformed", lambda o, n, r: pack_frame(ACK, r, struct.pack("<IB", 0, 1))),
    "a want of a get": ("malformed", lambda o, n, r: pack_frame(WANT, r)),
    "places behind blocks": ("malformed", lambda o, n, r: pack_frame(PLACES, r, encode(NO_PLACE))),
    "no msgpack": ("malformed", lambda o, n, r: pack_frame(END, r, b"\xc1\xc1")),
    "no ring": ("malformed", lambda o, n, r: pack_frame(RING, 0, b"{}")),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_a_wrong_answer_is_trouble_and_what_came_before_stays(host: Host, name: str) -> None:
    kind, answer = ANSWERS[name]

    async def test() -> None:
        reader, owner = open_node(host, "reader"), open_node(host, "owner")
        names = chain(owner.cache, BLOCKS)
        fill(owner, names, FORMAT)

        async def script(incoming: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
            request = await read_request(incoming)
            out.write(block(owner, names, request, 0) + answer(owner, names, request))  # type: ignore[arg-type]
            if kind == "corrupt":
                await incoming.read()  # the client says goodbye

        async with hostile(script) as client:
            with pytest.raises(PeerTrouble) as caught:
                await client.get(reader.store, addresses(names), deadline=after(20))
            assert caught.value.kind == kind, caught.value
            assert caught.value.arrived[0]
            assert whole(reader.store, names, FORMAT) == sum(caught.value.arrived)
            assert_idle(reader, owner)

    run(test)


SILENT: dict[str, Callable[[Node, list[bytes], int], bytes]] = {
    "nothing": lambda o, n, r: b"",
    "half a head": lambda o, n, r: block(o, n, r, 0)[:5],
    "half a block": lambda o, n, r: block(o, n, r, 0)[:-9],
    "one block of four": lambda o, n, r: block(o, n, r, 0),
    "all blocks, no end": lambda o, n, r: b"".join(block(o, n, r, index) for index in range(BLOCKS)),
}  # fmt: skip


@pytest.mark.parametrize("name", SILENT)
def test_a_silent_peer_costs_its_deadline(host: Host, name: str) -> None:
    async def test() -> None:
        reader, owner = open_node(host, "reader"), open_node(host, "owner")
        names = chain(owner.cache, BLOCKS)
        fill(owner, names, FORMAT)

        async def script(incoming: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
            out.write(SILENT[name](owner, names, await read_request(incoming)))  # type: ignore[arg-type]
            await incoming.read()

        async with hostile(script, lookup_s=0.1) as client:
            began = time.monotonic()
            with pytest.raises(PeerTrouble) as caught:
                await client.get(reader.store, addresses(names), deadline=after(0.4))
            assert time.monotonic() - began < 3
            assert caught.value.kind == "silent"
            assert whole(reader.store, names, FORMAT) == sum(caught.value.arrived)
            assert_idle(reader, owner)  # already now, not when the connection is gone
        assert_idle(reader, owner)

    run(test)


def test_a_peer_that_never_answers_a_put_costs_its_deadline(host: Host) -> None:
    async def test() -> None:
        reader = open_node(host, "reader", block_format=BIG, blocks=8)
        names = chain(reader.cache, 6)
        fill(reader, names, BIG)

        async def script(incoming: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
            request = await read_request(incoming)
            out.write(pack_frame(WANT, request, struct.pack("<6I", *range(6))))
            await asyncio.sleep(30)  # never reads again

        async with hostile(script, lookup_s=0.1) as client:
            with pytest.raises(PeerTrouble) as caught:
                await client.put(reader.store, names, deadline=after(0.4))
            assert caught.value.kind == "silent"
            assert not any(caught.value.arrived)
            assert_idle(reader)

    run(test)


PLACED: dict[str, Callable[[list[str]], Places]] = {
    "outside of the file": lambda paths: places(paths[0], offset=1 << 40),
    "not aligned": lambda paths: places(paths[0], offset=64),
    "no arena": lambda paths: places("/etc/passwd"),
    "not there": lambda paths: places(paths[0] + ".gone.arena"),
    "another inode": lambda paths: places(paths[0], inode=1),
}


def places(path: str, *, offset: int = 0, inode: int | None = None) -> Places:
    import os

    try:
        info = os.stat(path)
        device, found = info.st_dev, info.st_ino
    except FileNotFoundError:
        device, found = 1, 1
    file = PlacedFile(path, device, found if inode is None else inode)
    return Places((file,), (0,) * BLOCKS, (offset,) * BLOCKS)


@pytest.mark.parametrize("name", PLACED)
def test_places_that_are_none_are_a_miss_or_asked_again_over_the_network(host: Host, name: str) -> None:
    async def test() -> None:
        reader, owner = open_node(host, "reader"), open_node(host, "owner")
        names = chain(owner.cache, BLOCKS)
        fill(owner, names, FORMAT)
        arenas = [str(path) for path in host.arenas() if "owner" in path.name]

        async def script(incoming: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
            request = await read_request(incoming)
            out.write(pack_frame(PLACES, request, encode(PLACED[name](arenas))) + end_frame(request))
            await read_request(incoming)  # the lease ends
            request = await read_request(incoming)
            out.write(b"".join(block(owner, names, request, index) for index in range(BLOCKS)))  # type: ignore[arg-type]
            out.write(end_frame(request))
            await incoming.read()

        async with hostile(script) as client:
            fetched = await client.get(reader.store, addresses(names), deadline=after(20))
            in_file = name in ("outside of the file", "not aligned")
            assert fetched.arrived == (not in_file,) * BLOCKS
            assert whole(reader.store, names, FORMAT) == (0 if in_file else BLOCKS)
            assert_idle(reader, owner)

    run(test)


async def expect_trouble(client: BulkClient, reader: Node, kind: str) -> None:
    with pytest.raises(PeerTrouble) as caught:
        await client.get(reader.store, addresses(chain(reader.cache, 2)), deadline=after(20))
    assert caught.value.kind == kind


@pytest.mark.parametrize(
    ("welcome", "kind"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64), "malformed"),
        (pack_welcome(Welcome(2, 0, NodeId("someone-else"))), "refused"),
        (pack_welcome(Welcome(0, BAD_TICKET, OWNER)), "refused"),
        (pack_welcome(Welcome(9, 0, OWNER)), "versions"),
        (b"TC", "refused"),
    ],
)
def test_who_does_not_shake_hands_as_agreed_is_no_peer(host: Host, welcome: bytes, kind: str) -> None:
    async def nothing(incoming: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
        """Closes."""

    async def test() -> None:
        async with hostile(nothing, welcome=welcome) as client:
            await expect_trouble(client, open_node(host, "reader"), kind)

    run(test)


def test_a_connection_lost_while_idle_is_no_trouble(host: Host) -> None:
    async def test() -> None:
        reader, owner = open_node(host, "reader"), open_node(host, "owner")
        names = chain(owner.cache, BLOCKS)
        fill(owner, names, FORMAT)

        async def script(incoming: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
            request = await read_request(incoming)
            out.write(b"".join(block(owner, names, request, index) for index in range(BLOCKS)))  # type: ignore[arg-type]
            out.write(end_frame(request))  # then it closes

        async with hostile(script) as client:
            for _ in range(3):
                fetched = await client.get(reader.store, addresses(names), deadline=after(20))
                assert fetched.arrived == (True,) * BLOCKS
                await until(lambda: not client.connected)

    run(test)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def test_go_away_before_the_first_request_is_no_trouble(host: Host) -> None:
    async def test() -> None:
        reader, owner = open_node(host, "reader"), open_node(host, "owner")
        names = chain(owner.cache, BLOCKS)
        fill(owner, names, FORMAT)
        connections: list[int] = []

        async def script(incoming: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
            connections.append(len(connections))
            if len(connections) == 1:
                out.write(pack_frame(GOAWAY, 0))
            while True:  # whoever asks all the same is served
                request = await read_request(incoming)
                out.write(b"".join(block(owner, names, request, index) for index in range(BLOCKS)))  # type: ignore[arg-type]
                out.write(end_frame(request))

        async with hostile(script) as client:
            for _ in range(3):
                fetched = await client.get(reader.store, addresses(names), deadline=after(20))
                assert fetched.arrived == (True,) * BLOCKS
            assert len(connections) == 2

    run(test)
