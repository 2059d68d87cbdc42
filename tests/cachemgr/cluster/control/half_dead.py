"""Servers that do not do as they should: they never answer, answer garbage, reset, stop halfway."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable

Behave = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

_SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_SETTINGS_ACK = b"\x00\x00\x00\x04\x01\x00\x00\x00\x00"
_HALF_HEADERS = b"\x00\x00\x40\x01\x04\x00\x00\x00\x01" + b"\x88" * 8


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Takes everything, says nothing."""
    while await reader.read(1 << 16):
        pass


async def shakes_hands_only(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Speaks HTTP/2 until the connection stands, and never answers a request."""
    writer.write(_SETTINGS + _SETTINGS_ACK)
    await silent(reader, writer)


async def garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Speaks something else."""
    writer.write(b"HTTP/1.1 200 OK\r\n\r\nhello " * 50)
    await silent(reader, writer)


async def half_an_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Begins an answer and stops."""
    await shakes_hands_only_until_asked(reader, writer)
    writer.write(_HALF_HEADERS)
    await silent(reader, writer)


async def shakes_hands_only_until_asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(_SETTINGS + _SETTINGS_ACK)
    seen = b""
    while b"tensorcache" not in seen and len(seen) < 4096:
        more = await reader.read(1 << 16)
        if not more:
            return
        seen += more


async def resets(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Resets as soon as something is said."""
    await reader.read(1)
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def resets_when_asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Stands until a request comes, then resets."""
    await shakes_hands_only_until_asked(reader, writer)
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


KINDS = (silent, shakes_hands_only, garbage, half_an_answer, resets, resets_when_asked)


@contextlib.asynccontextmanager
async def half_dead(behave: Behave, port: int = 0) -> AsyncIterator[int]:
    """A server on 127.0.0.1 that behaves so; its port."""
    running: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        try:
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await behave(reader, writer)
        finally:
            running.discard(task)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", port)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()
        for task in list(running):
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await server.wait_closed()


class FreezingProxy:
    """Forwards to a port; `freeze`: its connections so far neither forward nor end, as on a lost route."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._frozen = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The behaviour of one connection, for `half_dead`."""
        frozen = self._frozen
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_pump(reader, there_writer, frozen))
                group.create_task(_pump(there_reader, writer, frozen))
        finally:
            there_writer.close()

    def freeze(self) -> None:
        """Those that come later are not."""
        self._frozen.set()
        self._frozen = asyncio.Event()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, frozen: asyncio.Event) -> None:
    while data := await reader.read(1 << 16):
        if frozen.is_set():
            await asyncio.Event().wait()
        writer.write(data)
