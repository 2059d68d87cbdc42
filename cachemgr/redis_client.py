"""A client of one Redis server for whoever keeps something there: a deadline per exchange, no second tries.

Everything that can go wrong is a `RedisTrouble`: one line that names the server as host:port, without the
password or the rest of the address it came in. Trying again is for callers, who know how long it is worth it.
Beside AUTH and SELECT only commands that were asked for are sent, so that an ACL need allow no others.

Threads: that of the asyncio loop that uses it.
"""

import asyncio
import contextlib
import ssl
from collections.abc import Sequence
from typing import Any

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from cachemgr.errors import CacheError
from cachemgr.redis_address import RedisAddress

Command = Sequence[str | bytes | int]
"""A command's name and its arguments."""

_RESP2 = 2  # RESP3 would begin with HELLO, which few ACLs allow
_SHOWN = 200


class RedisTrouble(CacheError):
    """Redis is not there, too slow, or said no; `refused` if it answered: asking again is of no use."""

    def __init__(self, text: str, *, refused: bool = False) -> None:
        super().__init__(text)
        self.refused = refused


class RedisClient:
    """Asks one server. Connections are made when needed, kept, and made anew after trouble."""

    def __init__(self, address: RedisAddress, *, timeout_s: float, connections: int = 4) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._redis = Redis(
            host=address.host,
            port=address.port,
            db=address.database,
            username=address.username or None,
            password=address.password or None,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            max_connections=connections,
            protocol=_RESP2,
            driver_info=None,  # else CLIENT SETINFO
            **({"ssl": True, **address.tls_files} if address.tls else {}),  # type: ignore[arg-type]
        )
        self._redis.response_callbacks.clear()  # answers as they came, not as the command's name lets expect

    async def ask(self, *commands: Command) -> list[Any]:
        """Answers to `commands` (bytes, int, list, None), sent together; RedisTrouble where one was refused.

        RedisTrouble is raised where there is no answer at all. A command may have been obeyed all the same.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                pipeline = self._redis.pipeline(transaction=False)
                for command in commands:
                    pipeline.execute_command(*command)
                answers = await pipeline.execute(raise_on_error=False)
        except (exceptions.RedisError, OSError) as error:  # our own timeout is an OSError
            raise self._trouble(error) from None
        return [self._trouble(one) if isinstance(one, Exception) else one for one in answers]

    async def ask_one(self, *command: str | bytes | int) -> Any:
        """The answer to one command; RedisTrouble if it was refused, too."""
        [answer] = await self.ask(command)
        if isinstance(answer, RedisTrouble):
            raise answer
        return answer

    async def close(self) -> None:
        """Close all connections, whatever is left to say on them. Idempotent."""
        with contextlib.suppress(exceptions.RedisError, OSError):
            await self._redis.aclose()

    def __repr__(self) -> str:
        return f"RedisClient({self.address})"

    def _trouble(self, error: Exception) -> RedisTrouble:
        return RedisTrouble(
            f"Redis at {self.address} {self._reason(error)}",
            refused=isinstance(error, (exceptions.ResponseError, exceptions.AuthenticationError)),
        )

    def _reason(self, error: Exception) -> str:
        match error:
            case exceptions.AuthenticationError():
                return "refuses this user name and password"
            case exceptions.OutOfMemoryError():
                return "is full: raise its maxmemory, or let what does not belong there expire"
            case exceptions.NoPermissionError():
                return f"does not permit what is needed: {self._safe(error)}"
            case exceptions.BusyLoadingError():
                return "is still loading its data"
            case exceptions.ReadOnlyError():
                return "is a read-only replica: name the one that takes writes"
            case exceptions.ResponseError():
                return f"refuses: {self._safe(error)}"
            case exceptions.TimeoutError() | TimeoutError():
                return f"does not answer within {self._timeout_s:g} s"
        if isinstance(error.__cause__ or error.__context__, ssl.SSLError):
            return f"does not prove who it is: {self._safe(error)}"
        return f"is not there: {self._safe(error)}"

    def _safe(self, error: Exception) -> str:
        text = " ".join(str(error).split())[:_SHOWN] or type(error).__name__
        return text.replace(self.address.password, "…") if self.address.password else text
