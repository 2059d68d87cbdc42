"""Carries control messages over gRPC: bytes in, bytes out, one deadline per call, one typed error.

Alone imports grpc. Knows methods by name only; what the bytes mean is the business of `messages`.

Invariants
- A call ends by its deadline, whatever the other side does; nothing is retried after it may have been heard.
- A channel that is closed under a call makes it fail as LOST; it never looks like its caller being cancelled.

Threads: one asyncio loop. gRPC has threads of its own, which never call us.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

import grpc
import grpc.aio

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

Handler = Callable[[bytes], Awaitable[bytes]]
"""Takes an encoded request; ControlTrouble is how it refuses."""

Q = TypeVar("Q", bound=Request)
R = TypeVar("R", bound=Reply)

SERVICE = "tensorcache.Control"
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
}
_TROUBLES = {
    grpc.StatusCode.DEADLINE_EXCEEDED: Trouble.DEADLINE,
    grpc.StatusCode.UNAVAILABLE: Trouble.LOST,
    grpc.StatusCode.CANCELLED: Trouble.LOST,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Trouble.BUSY,
    grpc.StatusCode.UNIMPLEMENTED: Trouble.UNKNOWN,
    grpc.StatusCode.INVALID_ARGUMENT: Trouble.INVALID,
    grpc.StatusCode.INTERNAL: Trouble.FAILED,
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
    """A `Channel`; over mTLS if the settings name certificates."""

    def __init__(self, address: str, *, settings: ClusterSettings | None = None) -> None:
        target = f"dns:///{address}"
        if settings is not None and settings.tls_cert:
            credentials = grpc.ssl_channel_credentials(
                _pem(settings.tls_ca, "tls_ca"),
                _pem(settings.tls_key, "tls_key"),
                _pem(settings.tls_cert, "tls_cert"),
            )
            self._channel = grpc.aio.secure_channel(target, credentials, options=_CHANNEL_OPTIONS)
        else:
            self._channel = grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS)
        self._calls: dict[str, Callable[..., Awaitable[bytes]]] = {}

    async def call(self, method: str, request: bytes, *, timeout_s: float) -> bytes:
        """The encoded reply; ControlTrouble in trouble."""
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
        await self._channel.close(grace_s or None)


class GrpcServer:
    """Listens for control calls and gives each to the handler of its method."""

    def __init__(self, handlers: Mapping[str, Handler], *, settings: ClusterSettings | None = None) -> None:
        self._handlers = handlers
        self._settings = settings
        self._server: Any = None

    async def start(self, address: str) -> int:
        """Listen on host:port (0: any free one); the port. SettingsError if it cannot be had."""
        server = grpc.aio.server(options=_SERVER_OPTIONS, maximum_concurrent_rpcs=MAX_CALLS)
        methods = {
            name: grpc.unary_unary_rpc_method_handler(_served(name, handler))
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
        settings = self._settings
        if settings is None or not settings.tls_cert:
            return int(server.add_insecure_port(address))
        credentials = grpc.ssl_server_credentials(
            [(_pem(settings.tls_key, "tls_key"), _pem(settings.tls_cert, "tls_cert"))],
            root_certificates=_pem(settings.tls_ca, "tls_ca"),
            require_client_auth=True,
        )
        return int(server.add_secure_port(address, credentials))


def ask(
    address: str,
    method: Method[Q, R],
    request: Q,
    *,
    timeout_s: float,
    settings: ClusterSettings | None = None,
) -> R:
    """One question to the node at `address`, from where no loop runs; ControlTrouble in trouble.

    `request` names the cluster; its wire version is filled in here, after a Hello.
    """
    return asyncio.run(_ask(address, method, request, timeout_s=timeout_s, settings=settings))


async def _ask(
    address: str, method: Method[Q, R], request: Q, *, timeout_s: float, settings: ClusterSettings | None
) -> R:
    channel = GrpcChannel(address, settings=settings)
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


def _served(name: str, handler: Handler) -> Callable[[bytes, Any], Awaitable[bytes]]:
    async def serve(request: bytes, context: Any) -> bytes:
        try:
            return await handler(request)
        except ControlTrouble as trouble:
            code = _CODES.get(trouble.kind, grpc.StatusCode.INTERNAL)
            text = f"{trouble.kind.value}: {trouble}"
        except Exception:
            _log.exception("control call %s failed", name)
            code, text = grpc.StatusCode.INTERNAL, f"{Trouble.FAILED.value}: see the log of the node"
        return await _abort(context, code, text)

    return serve


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


def _pem(path: str, field: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise SettingsError(field, f"must be a readable PEM file ({error.strerror})", path) from None
