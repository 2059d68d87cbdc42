"""The server of a node's bulk channel: lets in who has a ticket, and serves each on a connection of its own.

Invariants
- A stranger costs a socket and one fixed-size read, for a few seconds at most; few are let wait at a time,
  and the one that has waited longest makes room.
- With certificates there is TLS, and who comes is the node that his certificate names. Without, only loopback
  is served, unless the settings allow plaintext.
- After `drain` or `close` no task, socket, pin or lease is left.
Threads: the IO thread.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from functools import partial

from cachemgr.cluster.bulk.ages import ConnectionAges
from cachemgr.cluster.bulk.frames import MalformedFrame
from cachemgr.cluster.bulk.hello import (
    BAD_TICKET,
    FULL,
    HELLO_NBYTES,
    NO_VERSION,
    WELCOME,
    WIRE_VERSIONS,
    Hello,
    Welcome,
    common_version,
    pack_welcome,
    parse_hello,
)
from cachemgr.cluster.bulk.send_budget import SendBudget
from cachemgr.cluster.bulk.server_calls import OnRead
from cachemgr.cluster.bulk.server_connection import ServerConnection, Serving
from cachemgr.cluster.bulk.streams import Stream, fill, send_all, tune, wrap
from cachemgr.cluster.bulk.tickets import Tickets
from cachemgr.cluster.bulk.transfer_leases import TransferLeases
from cachemgr.cluster.certificates import Certificates, ForeignCertificate
from cachemgr.cluster.contract import Rings
from cachemgr.cluster.settings import ClusterSettings, is_loopback
from cachemgr.contract import BlockHash
from cachemgr.errors import SettingsError
from cachemgr.host_contract import HostStore

log = logging.getLogger(__name__)

CONNECTIONS = 512
STRANGERS = 16
"""Connections that have shown no ticket yet."""
HELLO_S = 2.0
PINNED_NBYTES = 256 << 20
_WAITERS = 256
_BACKLOG = 128
_ACCEPT_PAUSE_S = 0.1


def _count_nothing(segment: BlockHash, blocks: int, nbytes: int) -> None:
    pass


def _never_hot(segment: BlockHash) -> int:
    return 0


class BulkServer:
    """`start`, `drain`, `close`. Made on the loop that runs it."""

    def __init__(
        self,
        stores: Callable[[bytes], HostStore | None],
        *,
        tickets: Tickets,
        rings: Rings,
        settings: ClusterSettings,
        certificates: Certificates | None = None,
        on_read: OnRead = _count_nothing,
        hot_of: Callable[[BlockHash], int] = _never_hot,
        pinned_nbytes: int = PINNED_NBYTES,
        versions: tuple[int, int] = WIRE_VERSIONS,
    ) -> None:
        """`stores`: format id → store; `on_read`: segment, blocks, bytes; `hot_of`: extra owners of a
        segment.
        """
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._tickets = tickets
        self._rings = rings
        self._settings = settings
        self._certificates = None if settings.bulk_plaintext else certificates
        self._ages = ConnectionAges(self._certificates, loop=loop)
        self.foreign = 0
        """Who came with a certificate that is not that of the node he said he is."""
        self._versions = versions
        self._serving = Serving(
            stores, rings, settings,
            budget=SendBudget(pinned_nbytes, waiters=_WAITERS, loop=loop),
            leases=TransferLeases(settings.lease_s, loop=loop), on_read=on_read, hot_of=hot_of,
        )  # fmt: skip
        self._listener: socket.socket | None = None
        self._paused: asyncio.TimerHandle | None = None
        self._strangers: dict[asyncio.Task[None], None] = {}
        """In the order in which they came."""
        self._tasks: set[asyncio.Task[None]] = set()
        """One per connection, strangers too."""
        self._connections: set[ServerConnection] = set()
        self._draining = False

    @property
    def tls(self) -> bool:
        """True if clients must speak TLS: for the door."""
        return self._certificates is not None

    @property
    def leases(self) -> TransferLeases:
        """Of the transfers under way."""
        return self._serving.leases

    @property
    def pinned_nbytes(self) -> int:
        """Bytes pinned for transfers under way, at most."""
        return self._serving.budget.used

    async def start(self, host: str) -> int:
        """Listen on a free port of `host`, and return it. SettingsError if TLS is needed there and not
        set.
        """
        loopback = is_loopback(f"[{host}]:0" if ":" in host else f"{host}:0")
        if not (loopback or self.tls or self._settings.bulk_plaintext):
            problem = "must be set, or bulk_plaintext, off loopback"
            raise SettingsError("tls_cert, tls_key, tls_ca", problem, host)
        found = await self._loop.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setblocking(False)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tune(listener, host)  # what it accepts inherits
            listener.bind(address)
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
        self._listener = listener
        self._loop.add_reader(listener, self._accept, listener)
        port: int = listener.getsockname()[1]
        return port

    async def drain(self) -> None:
        """Take no new connections, ask clients to leave, serve what runs; done when all have left.

        Who has not left after `call_s` is closed.
        """
        self._draining = True
        self._stop_listening()
        for connection in tuple(self._connections):
            connection.go_away()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._settings.call_s)
        await self.close()

    async def close(self) -> None:
        """End every connection at once. Idempotent."""
        self._stop_listening()
        self._ages.close()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._serving.leases.close()

    def _stop_listening(self) -> None:
        if self._paused is not None:
            self._paused.cancel()
            self._paused = None
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def _accept(self, listener: socket.socket) -> None:
        """Somebody waits in the backlog. No task does this: one that is cancelled could lose a socket."""
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # gone again
        except OSError as error:  # out of descriptors: whoever waits in the backlog is served later
            log.warning("bulk channel: cannot accept: %s", error)
            self._loop.remove_reader(listener)
            self._paused = self._loop.call_later(
                _ACCEPT_PAUSE_S, self._loop.add_reader, listener, self._accept, listener
            )
            return
        sock.setblocking(False)
        if len(self._strangers) >= STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.cancel()
        task = self._loop.create_task(self._serve(sock))
        self._tasks.add(task)
        self._strangers[task] = None
        task.add_done_callback(partial(self._forget, sock))

    def _forget(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        sock.close()  # a task that was cancelled before it began has not
        self._tasks.discard(task)
        self._strangers.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("bulk channel: a connection failed", exc_info=error)

    async def _serve(self, sock: socket.socket) -> None:
        """One connection, from its first byte to its last."""
        generation = self._ages.generation
        try:
            admitted = await self._admit(sock)
        except (OSError, TimeoutError, MalformedFrame) as error:
            log.debug("bulk channel: a stranger left or was left: %s", error)
            admitted = None
        finally:
            task = asyncio.current_task()
            if task is not None:
                self._strangers.pop(task, None)
        if admitted is None:
            sock.close()
            return
        stream, hello, wire = admitted
        connection = ServerConnection(stream, node=hello.node, wire=wire, serving=self._serving)
        self._connections.add(connection)
        self._ages.add(connection, generation=generation, leave=connection.go_away, end=connection.close)
        if self._draining:
            connection.go_away()
        try:
            await connection.run()
        except MalformedFrame as error:
            log.warning("bulk channel: %s: %s", hello.node, error)
        except OSError as error:
            log.debug("bulk channel: %s left: %s", hello.node, error)
        finally:
            self._connections.discard(connection)
            self._ages.discard(connection)

    async def _admit(self, sock: socket.socket) -> tuple[Stream, Hello, int] | None:
        """Read who comes; None if he is not let in."""
        stream: Stream | None = None
        try:
            async with asyncio.timeout(HELLO_S):
                tls = self._certificates.loaded.server if self._certificates is not None else None
                stream = await wrap(sock, tls=tls)
                data = bytearray(HELLO_NBYTES)
                await fill(stream, memoryview(data))
                hello = parse_hello(bytes(data))
                welcome = self._welcome(hello, stream)
                await send_all(stream, pack_welcome(welcome))
        except BaseException:
            if stream is None:
                sock.close()
            else:
                stream.close()
            raise
        if welcome.reason != WELCOME:
            stream.close()
            return None
        return stream, hello, welcome.version

    def _welcome(self, hello: Hello, stream: Stream) -> Welcome:
        me = self._rings.node
        # a ticket is used up by whoever shows it, also if his certificate is another node's
        redeemed = self._tickets.redeem(hello.ticket, hello.node)
        if not (self._proven(hello, stream) and redeemed):
            return Welcome(0, BAD_TICKET, me)
        if len(self._connections) >= CONNECTIONS:
            return Welcome(0, FULL, me)
        version = common_version(self._versions, hello.versions)
        return Welcome(version, WELCOME if version else NO_VERSION, me)

    def _proven(self, hello: Hello, stream: Stream) -> bool:
        """Is he who he says, as far as that can be told: without certificates his ticket says it alone."""
        if self._certificates is None:
            return True
        try:
            node = self._certificates.node_of(stream.certificate, pem=False)
        except ForeignCertificate as error:
            self.foreign += 1
            log.debug("bulk channel: %s", error)
            return False
        if node != hello.node:
            self.foreign += 1
            log.debug("bulk channel: the certificate of node %s came as node %s", node, hello.node)
        return node == hello.node
