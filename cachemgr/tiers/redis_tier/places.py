"""Which server has a segment: the one there is, or, of a Redis Cluster, the one that its slot map names.

The map is asked for at the start, when a server says that a key is another one's, and when one is in trouble;
a server that is in no map any more is let go. Until there is a map, nothing is there.

Threads: the IO loop.
"""

import asyncio
import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from cachemgr.contract import BlockHash
from cachemgr.redis_address import RedisAddress
from cachemgr.redis_client import RedisTrouble, key_slot
from cachemgr.tiers.redis_tier.keys import segment_tag
from cachemgr.tiers.redis_tier.server import Clock, Server

log = logging.getLogger(__name__)

MakeServer = Callable[[RedisAddress], Server]
_SLOTS = 16384
_SHORTEST_S = 0.5
"""Between two questions for the map."""


class Places(Protocol):
    """Where segments are kept."""

    @property
    def usable(self) -> bool:
        """True while there is a server that may be asked."""
        ...

    @property
    def left_alone(self) -> int:
        """How many servers are not asked now."""
        ...

    def server_of(self, segment: BlockHash) -> Server | None:
        """Whom to ask; None while nobody is known to have it."""
        ...

    def stale(self) -> None:
        """A server said that what we asked it for is another one's."""
        ...

    async def look(self) -> None:
        """See who answers, and what is where."""
        ...

    async def close(self) -> None:
        """Let go of every server. Idempotent."""
        ...


class OneServer:
    """Places of a Redis that is no cluster."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._said = False

    @property
    def usable(self) -> bool:
        """See Places."""
        return self._server.usable

    @property
    def left_alone(self) -> int:
        """See Places."""
        return int(not self._server.usable)

    def server_of(self, segment: BlockHash) -> Server | None:
        """See Places."""
        return self._server

    def stale(self) -> None:
        """See Places. It is a node of a cluster, then, and that was not said in the settings."""
        if not self._said:
            self._said = True
            text = (
                "Redis at %s is a node of a Redis Cluster: much is a miss until [redis] says cluster = true"
            )
            log.warning(text, self._server.address)

    async def look(self) -> None:
        """See Places."""
        await self._server.look()

    async def close(self) -> None:
        """See Places."""
        await self._server.close()


class ClusterServers:
    """Places of a Redis Cluster, one of whose nodes is at `seed`."""

    def __init__(self, seed: RedisAddress, *, make: MakeServer, clock: Clock) -> None:
        self._seed = make(seed)
        self._make = make
        self._clock = clock
        self._servers: dict[tuple[str, int], Server] = {}
        self._starts: list[int] = []
        self._owners: list[Server] = []
        self._stale = True
        self._asked_at = float("-inf")

    @property
    def usable(self) -> bool:
        """See Places."""
        return any(server.usable for server in self._owners)

    @property
    def left_alone(self) -> int:
        """See Places. Before there is a map, there is the seed."""
        return sum(not server.usable for server in self._servers.values() or (self._seed,))

    def server_of(self, segment: BlockHash) -> Server | None:
        """See Places."""
        at = bisect_right(self._starts, key_slot(segment_tag(segment))) - 1
        return self._owners[at] if at >= 0 else None

    def stale(self) -> None:
        """See Places."""
        self._stale = True

    async def look(self) -> None:
        """See Places."""
        await asyncio.gather(*(server.look() for server in (self._seed, *self._servers.values())))
        troubled = not all(server.usable for server in self._owners)
        if (self._stale or troubled) and self._clock() - self._asked_at >= _SHORTEST_S:
            self._asked_at = self._clock()
            await self._ask()

    async def close(self) -> None:
        """See Places."""
        for server in (self._seed, *self._servers.values()):
            await server.close()

    async def _ask(self) -> None:
        for server in (*self._servers.values(), self._seed):
            if not server.usable:
                continue
            try:
                [answer] = await server.ask([(b"CLUSTER", b"SLOTS")])
            except RedisTrouble:
                continue  # counted; the next one may know
            ranges = _ranges(answer, server.address)
            if ranges:
                await self._install(ranges)
                return

    async def _install(self, ranges: Sequence[tuple[int, str, int]]) -> None:
        self._stale = False
        places = {(host, port) for _, host, port in ranges}
        for place in places - set(self._servers):
            host, port = place
            self._servers[place] = self._make(replace(self._seed.address, host=host, port=port))
        gone = [self._servers.pop(place) for place in set(self._servers) - places]
        self._starts = [start for start, _, _ in ranges]
        self._owners = [self._servers[host, port] for _, host, port in ranges]
        for server in gone:
            await server.close()


def _ranges(answer: Any, asked: RedisAddress) -> list[tuple[int, str, int]]:
    """First slot, host and port of each range of CLUSTER SLOTS, ascending; empty if that is no whole map.

    A range that nobody has belongs to the one before it here: that one will say that it is not so.
    """
    if not isinstance(answer, list):
        return []
    found = []
    try:
        for start, _, (host, port, *_), *_ in answer:
            found.append((int(start), host.decode() if host else asked.host, int(port)))
    except (TypeError, ValueError, AttributeError):
        return []
    return sorted(found) if all(0 <= start < _SLOTS for start, _, _ in found) else []
