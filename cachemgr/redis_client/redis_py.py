"""redis-py and hiredis, as far as they are used here: no other module imports them.

Beside AUTH and SELECT nothing is sent that was not asked for, so that an ACL need allow no others. Nothing is
tried again: that is for callers, who know how long it is worth it.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from hiredis import ProtocolError, Reader, pack_command
from redis import exceptions
from redis.asyncio import Connection, Redis, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.connection import DefaultParser
from redis.crc import key_slot

from cachemgr.redis_address import RedisAddress

__all__ = ["Login", "ProtocolError", "Reader", "exceptions", "key_slot", "packed", "redis_at", "said"]

_RESP2 = 2  # RESP3 would begin with HELLO, which few ACLs allow


def redis_at(address: RedisAddress, *, timeout_s: float, connections: int) -> Redis:
    """A client that answers as the server does: no conversions by the command's name."""
    made = Redis(**_options(address, timeout_s), max_connections=connections, ssl=address.tls)
    made.response_callbacks.clear()
    return made


def said(answer: str) -> Exception:
    """The exception for an answer that is an error."""
    error: Exception = DefaultParser.parse_error(answer)  # type: ignore[no-untyped-call]
    return error


def packed(command: Sequence[str | bytes | int]) -> bytes:
    """A command as it is sent."""
    data: bytes = pack_command(tuple(command))  # type: ignore[arg-type]
    return data


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
        **(address.tls_files if address.tls else {}),
    }
