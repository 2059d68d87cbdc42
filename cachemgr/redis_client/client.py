"""A client of one Redis server for whoever keeps something there: a deadline per exchange, no second tries.

Everything that can go wrong is a `RedisTrouble`: one line that names the server as host:port, without the
password or the rest of the address it came in. Trying again is for callers, who know how long it is worth it.

Threads: that of the asyncio loop that uses it.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from cachemgr.redis_address import RedisAddress
from cachemgr.redis_client.redis_py import exceptions, redis_at
from cachemgr.redis_client.trouble import RedisTrouble, trouble_of

Command = Sequence[str | bytes | int]
"""A command's name and its arguments."""


class RedisClient:
    """Asks one server. Connections are made when needed, kept, and made anew after trouble."""

    def __init__(self, address: RedisAddress, *, timeout_s: float, connections: int = 4) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._redis = redis_at(address, timeout_s=timeout_s, connections=connections)

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
        return trouble_of(error, self.address, waited_s=self._timeout_s)
