"""Carries control messages over gRPC: bytes in, bytes out, one deadline per call, one typed error.

Alone imports grpc. Knows methods by name only; what the bytes mean is the business of `messages`.

Invariants
- A call ends by its deadline, whatever the other side does; nothing is retried after it may have been heard.
- A channel that is closed under a call makes it fail as LOST; it never looks like its caller being cancelled.
- With certificates, a handler hears only calls of who showed one of a node of this cluster, and whose it is;
  a channel reaches only the node that it was made for. Nobody can say again what was said inside TLS.

TLS is 1.3 between two of us. gRPC lets nobody forbid 1.2, for which a stranger needs a certificate, too.
Threads: one asyncio loop. gRPC has threads of its own: one asks whether there are new certificates.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NoReturn, Protocol, TypeVar

import grpc
import grpc.aio

from cachemgr.cluster.certificates import Certificates, ForeignCertificate, certificates_of, dns_name
from cachemgr.cluster.control.messages import (
    HELLO,
    MAX_MESSAGE_NBYTES,
    WIRE_MAX,
    WIRE_MIN,
    HelloRequest,
    Method,
    Reply,
    Request,
    common_wire,
    encode_message,
)
from cachemgr.cluster.control.packed import MessageError
from cachemgr.cluster.control.trouble import ControlTrouble, Trouble
from cachemgr.cluster.settings import ClusterSettings
from cachemgr.errors import SettingsError
from cachemgr.ring import NodeId

Handler = Callable[[bytes, NodeId | None], Awaitable[bytes]]
"""Takes an encoded request and whose certificate came with it (None: there are none here); ControlTrouble is
how it refuses.
"""

Q = TypeVar("Q", bound=Request)
R = TypeVar("R", bound=Reply)

SERVICE = "tensorcache.Control"
_REPLACED_S = 10.0
"""What calls have to end on a connection that new certificates replaced."""
MAX_CALLS = 512
"""Calls that a server works on at once; more are refused as BUSY."""

_SIZES = [
    ("grpc.max_send_message_length", MAX_MESSAGE_NBYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_NBYTES),
    ("grpc.max_metadata_size", 16 << 10),
]
_SERVER_OPTIONS = [
    *_SIZES,
    ("grpc.so_reuseport", 0),  # a second node on this port is a mistake, not a load balancer
    ("grpc.http2.min_ping_interval_without_data_ms", 4_000),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 5_000),
]
_CERTIFIED_SERVER_OPTIONS = [
    *_SERVER_OPTIONS,
    ("grpc.max_connection_age_ms", 60_000),  # so that no connection outlives its certificate by much
    ("grpc.max_connection_age_grace_ms", 10_000),
]
_CHANNEL_OPTIONS = [
    *_SIZES,
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel is a new connection, without the old one's pause
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 2_000),
]

_CODES = {
    Trouble.CLUSTER: grpc.StatusCode.FAILED_PRECONDITION,
    Trouble.WIRE: grpc.StatusCode.FAILED_PRECONDITION,
    Trouble.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    Trouble.BUSY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Trouble.IDENTITY: grpc.StatusCode.UNAUTHENTICATED,
}
_TROUBLES = {
    grpc.StatusCode.DEADLINE_EXCEEDED: Trouble.DEADLINE,
    grpc.StatusCode.UNAVAILABLE: Trouble.LOST,
    grpc.StatusCode.CANCELLED: Trouble.LOST,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Trouble.BUSY,
    grpc.StatusCode.UNIMPLEMENTED: Trouble.UNKNOWN,
    grpc.StatusCode.INVALID_ARGUMENT: Trouble.INVALID,
    grpc.StatusCode.INTERNAL: Trouble.FAILED,
    grpc.StatusCode.UNAUTHENTICATED: Trouble.IDENTITY,
}

_log = logging.getLogger(__name__)


class Channel(Protocol):
    """A connection to one address, made when it is first used and again whenever it broke."""

    async def call(self, method: str, request: bytes, *, timeout_s: float) -> bytes:
        """The encoded reply; ControlTrouble in trouble."""
        ...

    async def close(self, grace_s: float = 0.0) -> None:
        """Let calls under way finish for `grace_s`, break those left."""
        ...


class GrpcChannel:
    """A `Channel`; inside TLS if there are certificates, over a new connection when there are new ones."""

    def __init__(
        self, address: str, *, certificates: Certificates | None = None, node: NodeId | None = None
    ) -> None:
        """`node`: who must be there; None: anyone of the cluster's CA whose certificate names the host."""
        self._target = f"dns:///{address}"
        self._certificates = certificates
        self._node = node
        self._generation = 0
        self._calls: dict[str, Callable[..., Awaitable[bytes]]] = {}
        self._replaced: dict[asyncio.Task[None], Any] = {}
        self._closed = False
        self._channel = self._made()

    async def call(self, method: str, request: bytes, *, timeout_s: float) -> bytes:
        """The encoded reply; ControlTrouble in trouble."""
        if self._certificates is not None and self._certificates.generation != self._generation:
            self._replace()
        call = self._calls.get(method)
        if call is None:
            call = self._calls[method] = self._channel.unary_unary(f"/{SERVICE}/{method}")
        try:
            return await call(request, timeout=max(timeout_s, 0.0))
        except grpc.aio.AioRpcError as error:
            raise _trouble(method, error.code(), error.details() or "") from None
        except grpc.aio.UsageError:  # closed meanwhile
            raise ControlTrouble(Trouble.CLOSED, f"{method}: the connection is closed") from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise ControlTrouble(Trouble.LOST, f"{method}: the connection was closed") from None

    async def close(self, grace_s: float = 0.0) -> None:
        """Let calls under way finish for `grace_s`, break those left. Idempotent."""
        self._closed = True
        replaced = dict(self._replaced)
        for task in replaced:
            task.cancel()
        await asyncio.gather(*replaced, return_exceptions=True)
        for channel in replaced.values():
            await channel.close()
        await self._channel.close(grace_s or None)

    def _made(self) -> Any:
        if self._certificates is None:
            return grpc.aio.insecure_channel(self._target, options=_CHANNEL_OPTIONS)
        self._generation, loaded = self._certificates.generation, self._certificates.loaded
        options: list[tuple[str, Any]] = list(_CHANNEL_OPTIONS)
        if self._node is not None:  # gRPC compares it with the DNS names of what the server shows
            name = dns_name(self._certificates.cluster, self._node)
            options.append(("grpc.ssl_target_name_override", name))
        credentials = grpc.ssl_channel_credentials(loaded.ca, loaded.key, loaded.cert)
        return grpc.aio.secure_channel(self._target, credentials, options=options)

    def _replace(self) -> None:
        """Calls under way end on the connection on which they began."""
        if self._closed:
            return
        task = asyncio.create_task(self._channel.close(_REPLACED_S), name="close-replaced")
        self._replaced[task] = self._channel
        task.add_done_callback(lambda task: self._replaced.pop(task, None))
        self._calls.clear()
        self._channel = self._made()


class UnreachableChannel:
    """A `Channel` to a node on another host, where there are no certificates: nothing is ever sent there."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def call(self, method: str, request: bytes, *, timeout_s: float) -> bytes:
        """Always ControlTrouble."""
        text = f"{self._address} is not on this host, and without certificates (tls_cert) it is not asked"
        raise ControlTrouble(Trouble.PLAINTEXT, text)

    async def close(self, grace_s: float = 0.0) -> None:
        """Nothing is open."""


class GrpcServer:
    """Listens for control calls and gives each to the handler of its method."""

    def __init__(
        self, handlers: Mapping[str, Handler], *, certificates: Certificates | None = None
    ) -> None:
        self._handlers = handlers
        self._certificates = certificates
        self._server: Any = None
        self.foreign = 0
        """Calls of who showed a certificate of our CA that is not one of a node of this cluster."""

    async def start(self, address: str) -> int:
        """Listen on host:port (0: any free one); the port. SettingsError if it cannot be had."""
        options = _SERVER_OPTIONS if self._certificates is None else _CERTIFIED_SERVER_OPTIONS
        server = grpc.aio.server(options=options, maximum_concurrent_rpcs=MAX_CALLS)
        methods = {
            name: grpc.unary_unary_rpc_method_handler(self._served(name, handler))
            for name, handler in self._handlers.items()
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        try:
            port = self._bind(server, address)
        except RuntimeError:
            await server.stop(None)
            raise SettingsError("listen", "must be a free address of this host", address) from None
        await server.start()
        self._server = server
        return int(port)

    async def close(self, grace_s: float) -> None:
        """Take no new calls, let those under way finish for `grace_s`. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(grace_s)

    def _bind(self, server: Any, address: str) -> int:
        if self._certificates is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, _server_credentials(self._certificates)))

    def _served(self, name: str, handler: Handler) -> Callable[[bytes, Any], Awaitable[bytes]]:
        async def serve(request: bytes, context: Any) -> bytes:
            try:
                return await handler(request, self._caller(context))
            except ControlTrouble as trouble:
                code = _CODES.get(trouble.kind, grpc.StatusCode.INTERNAL)
                text = f"{trouble.kind.value}: {trouble}"
            except Exception:
                _log.exception("control call %s failed", name)
                code, text = grpc.StatusCode.INTERNAL, f"{Trouble.FAILED.value}: see the log of the node"
            return await _abort(context, code, text)

        return serve

    def _caller(self, context: Any) -> NodeId | None:
        """Whose certificate the caller showed; ControlTrouble for a stranger's."""
        if self._certificates is None:
            return None
        shown = context.auth_context().get("x509_pem_cert") or [b""]
        try:
            return self._certificates.node_of(shown[0], pem=True)
        except ForeignCertificate as error:
            self.foreign += 1
            raise ControlTrouble(Trouble.IDENTITY, str(error)) from None


def _server_credentials(certificates: Certificates) -> Any:
    """For each new connection gRPC asks, on a thread of its own, whether there are new certificates."""
    taken = certificates.generation

    def configuration() -> Any:
        loaded = certificates.loaded
        return grpc.ssl_server_certificate_configuration([(loaded.key, loaded.cert)], loaded.ca)

    def newer() -> Any:
        nonlocal taken
        now = certificates.generation
        if now == taken:
            return None
        taken = now
        return configuration()

    return grpc.dynamic_ssl_server_credentials(configuration(), newer, require_client_authentication=True)


def ask(
    address: str,
    method: Method[Q, R],
    request: Q,
    *,
    timeout_s: float,
    settings: ClusterSettings | None = None,
) -> R:
    """One question to the node at `address`, from where no loop runs; ControlTrouble in trouble.

    `request` names the cluster; its wire version is filled in here, after a Hello. With certificates (of any
    node of the cluster) the one that answers must be of the same CA and name the host of `address`.
    """
    return asyncio.run(_ask(address, method, request, timeout_s=timeout_s, settings=settings))


async def _ask(
    address: str, method: Method[Q, R], request: Q, *, timeout_s: float, settings: ClusterSettings | None
) -> R:
    certificates = None if settings is None else certificates_of(settings, cluster=request.cluster)
    channel = GrpcChannel(address, certificates=certificates)
    deadline = asyncio.get_running_loop().time() + timeout_s
    try:
        hello = HelloRequest(cluster=request.cluster, wire_min=WIRE_MIN, wire_max=WIRE_MAX)
        data = await channel.call(HELLO.name, encode_message(hello), timeout_s=timeout_s)
        answer = HELLO.decode_reply(data)
        wire = common_wire(answer.wire_min, answer.wire_max, ours=(WIRE_MIN, WIRE_MAX))
        if wire is None:
            raise ControlTrouble(
                Trouble.WIRE, f"{address} speaks wire versions {answer.wire_min}..{answer.wire_max}"
            )
        request.wire = wire
        left_s = deadline - asyncio.get_running_loop().time()
        return method.decode_reply(await channel.call(method.name, encode_message(request), timeout_s=left_s))
    except MessageError as error:
        raise ControlTrouble(Trouble.GARBAGE, str(error)) from None
    finally:
        await channel.close()


async def _abort(context: Any, code: grpc.StatusCode, text: str) -> NoReturn:
    await context.abort(code, text)
    raise AssertionError("abort raises")


def _trouble(method: str, code: grpc.StatusCode, details: str) -> ControlTrouble:
    kind = _TROUBLES.get(code, Trouble.GARBAGE)
    if code is grpc.StatusCode.FAILED_PRECONDITION:
        kind = Trouble.WIRE if details.startswith(Trouble.WIRE.value) else Trouble.CLUSTER
    elif kind is Trouble.LOST and "refused" in details.lower():
        kind = Trouble.REFUSED
    return ControlTrouble(kind, f"{method}: {details[:300] or code.name}")
