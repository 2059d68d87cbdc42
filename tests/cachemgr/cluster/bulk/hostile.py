"""A server that lets everyone in and then does what a test says; and frames to do it with."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from cachemgr.cluster.bulk.client import BulkClient
from cachemgr.cluster.bulk.frames import (
    BLOCK,
    BLOCK_META,
    BLOCK_META_NBYTES,
    END,
    FROM_CLIENT,
    HEAD_NBYTES,
    pack_frame,
    pack_head,
    parse_head,
)
from cachemgr.cluster.bulk.hello import HELLO_NBYTES, WELCOME, Welcome, pack_welcome
from cachemgr.cluster.bulk.messages import Ended, encode
from cachemgr.cluster.bulk.opening import BulkDoor
from cachemgr.contract import BlockHash
from cachemgr.ring import NodeId
from tests.cachemgr.cluster.bulk.pair import OWNER, READER, FixedRings, settings
from tests.cachemgr.node import Node

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def hostile(
    script: Script, *, welcome: bytes | None = None, lookup_s: float = 10.0
) -> AsyncIterator[BulkClient]:
    """A client of a server that shakes hands and then runs `script`; a connection that it left is closed."""
    running: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        try:
            await reader.readexactly(HELLO_NBYTES)
            writer.write(pack_welcome(Welcome(2, WELCOME, OWNER)) if welcome is None else welcome)
            await script(reader, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the test is over
        finally:
            writer.close()
            running.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    async def open_channel() -> BulkDoor:
        return BulkDoor("127.0.0.1", port, bytes(32), same_host=True, tls=False)

    client = BulkClient(
        OWNER, me=READER, open_channel=open_channel, rings=FixedRings(READER),
        settings=settings(lookup_s=lookup_s, same_host=True, lease_s=0.5),
    )  # fmt: skip
    try:
        yield client
    finally:
        await client.close()
        server.close()
        for task in tuple(running):
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await server.wait_closed()


async def read_request(reader: asyncio.StreamReader) -> int:
    """The number of the next request."""
    head = parse_head(await reader.readexactly(HEAD_NBYTES), FROM_CLIENT)
    await reader.readexactly(head.length)
    return head.request


def block_frame(node: Node, name: BlockHash, *, request: int, index: int) -> bytes:
    """A block of `node` as an honest server sends it."""
    held = node.hold_one(name)
    body = BLOCK_META.pack(index) + held.header + bytes(held.payload)
    node.store.let_go([held])
    return pack_head(BLOCK, request, len(body)) + body


def end_frame(request: int, status: str = "done") -> bytes:
    version = FixedRings(NodeId("x")).ring.version
    return pack_frame(END, request, encode(Ended(status, version.epoch, version.digest)))  # type: ignore[arg-type]


PAYLOAD_AT = HEAD_NBYTES + BLOCK_META_NBYTES
