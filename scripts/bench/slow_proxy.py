"""A TCP proxy in front of Redis, in a process of its own, that holds up each value on its way to who asked.

    python -m scripts.bench.slow_proxy PORT MILLISECONDS

It says its own port, and ends with its input. A value is a bulk string of at least 64 KiB: small answers and
all that goes to the server pass at once. Values of one connection come in order, so the n-th of a pipeline
comes n times so late.
"""

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_VALUE_NBYTES = 64 << 10
_READ_NBYTES = 256 << 10
_END_S = 10.0

_Way = tuple[asyncio.StreamReader, asyncio.StreamWriter]
"""Where bytes of one direction come from, and where they go."""


class Frames:
    """Finds where values begin in what a Redis answers, cut anywhere."""

    def __init__(self) -> None:
        self._line = b""
        self._string_left = 0

    def split(self, data: bytes) -> Iterator[tuple[bytes, bool]]:
        """`data` in parts; True for one behind which a value begins."""
        start = at = 0
        while at < len(data):
            if self._string_left:
                step = min(self._string_left, len(data) - at)
                self._string_left -= step
                at += step
                continue
            end = data.find(b"\n", at)
            self._line += data[at : len(data) if end < 0 else end]
            at = len(data) if end < 0 else end + 1
            if end >= 0 and self._take_line():
                yield data[start:at], True
                start = at
        if start < len(data):
            yield data[start:], False

    def _take_line(self) -> bool:
        """True if the line that ended announces a value."""
        line, self._line = self._line.rstrip(b"\r"), b""
        if line[:1] != b"$" or not line[1:].isdigit():
            return False
        nbytes = int(line[1:])
        self._string_left = nbytes + len(b"\r\n")
        return nbytes >= _VALUE_NBYTES


@contextmanager
def slowed(port: int, *, value_s: float) -> Iterator[int]:
    """The port of such a proxy in front of `port`."""
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, str(port), str(1e3 * value_s)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=_ROOT,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.stdin.close()
        try:
            process.wait(_END_S)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


async def _forward(asked: _Way, answered: _Way, *, value_s: float) -> None:
    """Both ways of one connection, until one of them ends."""
    ways = [asyncio.ensure_future(_pass(asked)), asyncio.ensure_future(_hold_up(answered, value_s))]
    try:
        ended, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.wait(ways)
    for way in ended:
        way.result()


async def _pass(way: _Way) -> None:
    _, writer = way
    async for data in _chunks(way):
        writer.write(data)
        await writer.drain()


async def _hold_up(way: _Way, value_s: float) -> None:
    _, writer = way
    frames = Frames()
    async for data in _chunks(way):
        for part, value_begins in frames.split(data):
            writer.write(part)
            await writer.drain()
            if value_begins:
                await asyncio.sleep(value_s)


async def _chunks(way: _Way) -> AsyncIterator[bytes]:
    reader, _ = way
    while data := await reader.read(_READ_NBYTES):
        yield data


async def _serve(port: int, value_s: float) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", port, limit=_READ_NBYTES)
        try:
            with contextlib.suppress(ConnectionError):  # who asked has gone, as he may
                await _forward((reader, server_writer), (server_reader, writer), value_s=value_s)
        finally:
            writer.close()
            server_writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=_READ_NBYTES)
    async with server:
        print(server.sockets[0].getsockname()[1], flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends who started this, and so its input
    asyncio.run(_serve(int(sys.argv[1]), float(sys.argv[2]) / 1e3))
