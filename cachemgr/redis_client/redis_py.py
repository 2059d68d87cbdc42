"""redis-py and hiredis, as far as they are used here: no other module imports them.

Beside AUTH and SELECT nothing is sent that was not asked for, so that an ACL need allow no others. Nothing is
tried again: that is for callers, who know how long it is worth it.
"""

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import Any

from hiredis import ProtocolError, Reader, pack_command
from redis import exceptions
from redis.asyncio import Connection, ConnectionPool, Redis, SSLConnection
from redis.asyncio.connection import DefaultParser as AsyncParser
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.connection import DefaultParser
from redis.crc import key_slot

from cachemgr.redis_address import RedisAddress

__all__ = [
    "BoundedReader", "Login", "ProtocolError", "Reader", "exceptions", "key_slot", "packed", "redis_at",
    "said",
]  # fmt: skip

_TOO_MANY = re.compile(rb"[*%~>][0-9]{7}")
_HEAD_NBYTES = 8
"""What of a count may still lie in the bytes that came before."""
_MOST_NBYTES = 64 << 20
"""Of one answer: far more than a ring with all its nodes."""

_RESP2 = 2  # RESP3 would begin with HELLO, which few ACLs allow


def redis_at(address: RedisAddress, *, timeout_s: float, connections: int) -> Redis:
    """A client that answers as the server does: no conversions by the command's name."""
    kind = SSLConnection if address.tls else Connection
    pool = ConnectionPool(kind, max_connections=connections, **_options(address, timeout_s))
    made = Redis.from_pool(pool)
    made.response_callbacks.clear()
    return made


def said(answer: str) -> Exception:
    """The exception for an answer that is an error."""
    try:
        error: Exception = DefaultParser.parse_error(answer)  # type: ignore[no-untyped-call]
    except (ValueError, IndexError):  # one that says MOVED, and not where to
        error = exceptions.ResponseError(answer)
    return error


def packed(command: Sequence[str | bytes | int]) -> bytes:
    """A command as it is sent."""
    data: bytes = pack_command(tuple(command))  # type: ignore[arg-type]
    return data


class BoundedReader:
    """A hiredis Reader for answers without values of strangers in them, which believes no size.

    It would make room for as many elements as an array says that it has, 16 GiB for 13 bytes, and look
    at all of it again when it lets go: seconds in which nothing else in this process runs.
    """

    def __init__(self, reader: Reader, *, error: Callable[[str], Exception] = ProtocolError) -> None:
        self._reader = reader
        self._error = error
        self._last = b""
        self.has_data = reader.has_data

    def gets(self, *decode: bool) -> Any:
        """See hiredis; the protocol's error also for what is no value here: a map whose key is a list."""
        try:
            return self._reader.gets(*decode)
        except (MemoryError, TypeError, ValueError) as error:
            raise self._error(f"an answer that is no value: {type(error).__name__}") from None

    def feed(self, data: bytes) -> None:
        """Take bytes; the protocol's error where they announce or bring too much."""
        if _TOO_MANY.search(self._last + data):
            raise self._error("an answer of too many parts")
        self._last = (self._last + data)[-_HEAD_NBYTES:]
        self._reader.feed(data)
        if self._reader.len() > _MOST_NBYTES:
            raise self._error("an answer of too many bytes")


class _BoundedParser(AsyncParser):  # type: ignore[misc, valid-type]
    """redis-py's own, over a bounded reader."""

    parse_error = staticmethod(said)

    def on_connect(self, connection: Any) -> None:
        """See redis-py."""
        super().on_connect(connection)
        made: Any = self._reader
        self._reader: Any = BoundedReader(made, error=exceptions.InvalidResponse)


class Login:
    """A connection that redis-py made and logged in on, taken over from there. Whoever has it closes it."""

    def __init__(self, address: RedisAddress, *, timeout_s: float) -> None:
        kind = SSLConnection if address.tls else Connection
        self._connection: Any = kind(**_options(address, timeout_s))

    async def connect(self, protocol: asyncio.BaseProtocol) -> asyncio.Transport:
        """Connect and log in; all that comes afterwards goes to `protocol`. RedisError or OSError."""
        await self._connection.connect()
        transport: asyncio.Transport = self._connection._writer.transport  # no public way to it
        transport.set_protocol(protocol)
        return transport

    def close(self) -> None:
        """Drop the connection, whatever is left to say on it. Idempotent; also after a failed `connect`."""
        writer, self._connection._writer = self._connection._writer, None
        self._connection._reader = None
        if writer is not None:
            writer.transport.abort()


def _options(address: RedisAddress, timeout_s: float) -> dict[str, Any]:
    return {
        "host": address.host,
        "port": address.port,
        "db": address.database,
        "username": address.username or None,
        "password": address.password or None,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "protocol": _RESP2,
        "driver_info": None,  # else CLIENT SETINFO
        "parser_class": _BoundedParser,
        **(address.tls_files if address.tls else {}),
    }
