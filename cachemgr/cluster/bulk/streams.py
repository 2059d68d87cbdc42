"""One connected socket, read into and sent from memory that the caller owns: plain, or inside TLS.

Both forms try first and wait only when the kernel has nothing (or takes nothing): no task, no buffer of our
own between the socket and an arena. While a long payload comes, the kernel wakes us for the next quarter
MiB, not for every packet. With TLS, bytes are decrypted straight into the caller's memory.

Invariants: `try_receive` and `try_send` never wait. Nothing is registered with the loop while nobody waits
for it for longer than one wake-up. After `close` every wait ends with StreamEnded.
Threads: the IO thread.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol

WAKE_NBYTES = 256 << 10
"""How much must have come before a reader of more is woken."""

_TLS_RECORDS = 64 << 10
"""Given to TLS at once: what it took but could not send must be offered again."""
_LOOPBACK_CONTROL = b"reno"
"""Of those that every process may choose, the one that does not pace."""

Buffer = bytes | memoryview


class StreamEnded(ConnectionError):
    """The connection is over: closed by either side."""


class Stream(Protocol):
    """A byte stream over one socket."""

    @property
    def certificate(self) -> bytes:
        """What the other side showed, DER; empty if it showed none."""
        ...

    def try_receive(self, into: memoryview) -> int:
        """Bytes received; 0 if none are there. StreamEnded at the end of the stream, OSError if it broke."""
        ...

    async def receivable(self, wanted: int) -> None:
        """Wait until `try_receive` has something, and rather more if `wanted` is a lot."""
        ...

    def try_send(self, views: Iterable[Buffer]) -> int:
        """Bytes taken from the front of `views`; 0 if none. What was not taken is offered again unchanged."""
        ...

    def when_sendable(self, callback: Callable[[], None]) -> None:
        """Call back, again and again, while `try_send` would take something; until `not_sending`."""
        ...

    def not_sending(self) -> None:
        """No more calls back."""
        ...

    def close(self) -> None:
        """Let go of the socket. Idempotent."""
        ...


class PlainStream:
    """A TCP socket as it is."""

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        self._sock = sock
        self._loop = loop
        self._fd = sock.fileno()
        self._reader: asyncio.Future[None] | None = None
        self._registered = False
        self._sending = False
        self._closed = False
        self._low_water = 1

    @property
    def certificate(self) -> bytes:
        """As Stream."""
        return b""

    def try_receive(self, into: memoryview) -> int:
        """As Stream."""
        try:
            count = self._sock.recv_into(into)
        except (BlockingIOError, InterruptedError):
            return 0
        if not count:
            raise StreamEnded("the other side closed the connection")
        return count

    async def receivable(self, wanted: int) -> None:
        """As Stream."""
        if self._closed:
            raise StreamEnded("the connection is closed")
        low_water = min(wanted, WAKE_NBYTES)
        if low_water != self._low_water:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)
            self._low_water = low_water
        if not self._registered:
            self._loop.add_reader(self._fd, self._on_receivable)
            self._registered = True
        self._reader = self._loop.create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def try_send(self, views: Iterable[Buffer]) -> int:
        """As Stream."""
        try:
            return self._sock.sendmsg(views)
        except (BlockingIOError, InterruptedError):
            return 0

    def when_sendable(self, callback: Callable[[], None]) -> None:
        """As Stream."""
        if not self._sending and not self._closed:
            self._loop.add_writer(self._fd, callback)
            self._sending = True

    def not_sending(self) -> None:
        """As Stream."""
        if self._sending:
            self._loop.remove_writer(self._fd)
            self._sending = False

    def close(self) -> None:
        """As Stream."""
        if self._closed:
            return
        self._closed = True
        self.not_sending()
        if self._registered:
            self._loop.remove_reader(self._fd)
            self._registered = False
        if self._reader is not None and not self._reader.done():
            self._reader.set_exception(StreamEnded("the connection is closed"))
        self._sock.close()

    def _on_receivable(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
        elif self._reader is None:  # nobody reads at this moment: a level-triggered loop would call for ever
            self._loop.remove_reader(self._fd)
            self._registered = False


class TlsStream(PlainStream):
    """A TCP socket inside TLS 1.3, its handshake done."""

    _sock: ssl.SSLSocket

    @property
    def certificate(self) -> bytes:
        """As Stream."""
        return self._sock.getpeercert(binary_form=True) or b""

    def try_receive(self, into: memoryview) -> int:
        """As Stream."""
        try:
            count = self._sock.recv_into(into)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return 0
        except ssl.SSLEOFError as error:
            raise StreamEnded("the other side closed the connection inside TLS") from error
        if not count:
            raise StreamEnded("the other side closed the connection")
        return count

    async def receivable(self, wanted: int) -> None:
        """As Stream; records are not as long as what the caller wants, and may be here already."""
        if self._closed or not self._sock.pending():
            await super().receivable(1)

    def try_send(self, views: Iterable[Buffer]) -> int:
        """As Stream; `sendmsg` is not for TLS."""
        taken = 0
        for view in views:
            rest = memoryview(view).cast("B")
            while rest:
                try:
                    count = self._sock.send(rest[:_TLS_RECORDS])
                except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    return taken
                taken += count
                rest = rest[count:]
        return taken


async def fill(stream: Stream, into: memoryview) -> None:
    """Receive until `into` is full."""
    while into:
        count = stream.try_receive(into)
        if count:
            into = into[count:]
        else:
            await stream.receivable(len(into))


async def send_all(stream: Stream, data: bytes) -> None:
    """Send a few bytes before anything else uses the stream."""
    rest = memoryview(data)
    while rest:
        count = stream.try_send([rest])
        rest = rest[count:]
        if not count:
            await _sendable(stream)


async def connect(host: str, port: int, *, tls: ssl.SSLContext | None, name: str = "") -> Stream:
    """A stream to `host`; OSError (ssl.SSLError is one) if there is none. The caller has a deadline.

    `name`: which the certificate shown there must have, within TLS.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError:  # an empty or overlong label
        raise OSError(f"{host!r} is no name of a host") from None
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        tune(sock, host)
        await loop.sock_connect(sock, address)
        return await wrap(sock, tls=tls, server_name=name or host)
    except BaseException:
        sock.close()
        raise


async def wrap(sock: socket.socket, *, tls: ssl.SSLContext | None, server_name: str | None = None) -> Stream:
    """A stream over a connected, non-blocking socket; `server_name` only on the client's side.

    The socket is the stream's from then on, and closed if the handshake fails.
    """
    loop = asyncio.get_running_loop()
    if tls is None:
        return PlainStream(sock, loop)
    wrapped = tls.wrap_socket(
        sock, server_side=server_name is None, server_hostname=server_name,
        do_handshake_on_connect=False, suppress_ragged_eofs=False,
    )  # fmt: skip
    stream = TlsStream(wrapped, loop)
    try:
        while True:
            try:
                wrapped.do_handshake()
                return stream
            except ssl.SSLWantReadError:
                await stream.receivable(1)
            except ssl.SSLWantWriteError:
                await _sendable(stream)
    except BaseException:
        stream.close()
        raise


def tune(sock: socket.socket, host: str) -> None:
    """No waiting for more to send; on loopback no pacing either, which is made for links."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if host in ("127.0.0.1", "::1", "localhost"):
        with suppress(OSError):  # a kernel may be without it
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _LOOPBACK_CONTROL)


async def _sendable(stream: Stream) -> None:
    woken = asyncio.get_running_loop().create_future()
    stream.when_sendable(lambda: None if woken.done() else woken.set_result(None))
    try:
        await woken
    finally:
        stream.not_sending()
