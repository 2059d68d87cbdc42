"""What a cluster keeps in Redis: its ring, replaced only by who saw it, and which nodes live.

    tensorcache:<cluster>:ring           hash: `version` (text, sorts like versions), `state` (encoded ring)
    tensorcache:<cluster>:node:<id>      the node as JSON; expires unless it is written again and again
    tensorcache:<cluster>:nodes          set: ids whose key may exist, so that nobody has to scan the database

All that its user of Redis needs to be allowed: `tensorcache acl redis --role membership`. Redis must not
evict: `maxmemory-policy noeviction`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from cachemgr.cluster.rings import NO_RING
from cachemgr.errors import CacheError
from cachemgr.redis_client import Kind, RedisClient, RedisTrouble
from cachemgr.ring import Epoch, NodeId, NodeSpec, RingError, RingState, Version, decode_ring, encode_ring

_REPLACE = """
local held = redis.call('HGET', KEYS[1], 'version')
if held and held > ARGV[1] then return held end
redis.call('HSET', KEYS[1], 'version', ARGV[2], 'state', ARGV[3])
return false
"""


@dataclass(frozen=True, slots=True)
class Beat:
    """What came back with a sign of life."""

    held: Version | None
    """The version of the ring that is kept; None: there is none."""
    refusal: RedisTrouble | None
    """Why the sign of life itself was not taken."""
    namesake: str
    """Address of another node that wrote under our id since, or empty."""


class RedisRingStore:
    """The keys of one cluster. RedisTrouble in trouble, another CacheError if what is kept is no ring."""

    def __init__(self, client: RedisClient, *, cluster: str, alive_s: float) -> None:
        """`alive_s`: seconds for which one sign of life is good."""
        prefix = f"tensorcache:{cluster}:"
        self._client = client
        self._alive_ms = int(alive_s * 1000)
        self._ring, self._nodes, self._node = f"{prefix}ring", f"{prefix}nodes", f"{prefix}node:"

    async def beat(self, me: NodeSpec) -> Beat:
        """Say that we live, and see whether the ring has changed: one exchange."""
        key, value = self._node + me.id, msgspec.json.encode(me)
        version, before, *_ = answers = await self._client.ask(
            ("HGET", self._ring, "version"),
            ("SET", key, value, "PX", self._alive_ms, "GET"),
            ("SADD", self._nodes, me.id),
        )
        if isinstance(version, RedisTrouble):
            raise version
        refusals = [answer for answer in answers if isinstance(answer, RedisTrouble)]
        other = None if isinstance(before, RedisTrouble) else _node_of(before)
        namesake = other.address if other and other.address != me.address else ""
        return Beat(_version_of(version), refusals[0] if refusals else None, namesake)

    async def read(self) -> RingState | None:
        """The ring that is kept: one exchange."""
        data = await self._client.ask_one("HGET", self._ring, "state")
        if data is not None and not isinstance(data, bytes):
            raise self._strange("the ring")
        try:
            return None if data is None else decode_ring(data)
        except RingError as error:  # a newer release may have made it: not ours to replace
            raise CacheError(f"the ring kept in Redis cannot be read: {error}") from None

    async def replace(self, replaces: Version, state: RingState) -> Version | None:
        """Keep `state` unless a ring above `replaces` is kept: then its version, and nothing changed."""
        held = await self._client.ask_one(
            "EVAL", _REPLACE, 1, self._ring, _text(replaces), _text(state.version), encode_ring(state)
        )
        return _version_of(held)

    async def nodes(self) -> Mapping[NodeId, NodeSpec]:
        """Nodes that gave a sign of life lately; forgets the ids of others."""
        members = await self._client.ask_one("SMEMBERS", self._nodes)
        if not isinstance(members, list) or not all(isinstance(one, bytes) for one in members):
            raise self._strange("the nodes")
        ids = sorted({one.decode("ascii", "replace") for one in members})
        if not ids:
            return {}
        values = await self._client.ask_one("MGET", *(self._node + one for one in ids))
        if not isinstance(values, list) or len(values) != len(ids):
            raise self._strange("the nodes")
        found = {one: _node_of(value) for one, value in zip(ids, values, strict=True)}
        gone = [one for one, node in found.items() if node is None]
        if gone:  # one that comes back in this very moment is in the set again with its next sign of life
            await self._client.ask_one("SREM", self._nodes, *gone)
        return {NodeId(one): node for one, node in found.items() if node is not None}

    async def leave(self, node: NodeId) -> None:
        """We no longer live."""
        for answer in await self._client.ask(("DEL", self._node + node), ("SREM", self._nodes, node)):
            if isinstance(answer, RedisTrouble):
                raise answer

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    def _strange(self, what: str) -> RedisTrouble:
        reason = f"answers with something else than {what} when asked for it"
        return RedisTrouble(f"Redis at {self._client.address} {reason}", kind=Kind.ABSENT, reason=reason)


def _text(version: Version) -> str:
    return f"{version.epoch:020d}:{version.digest.hex()}"


def _version_of(value: object) -> Version | None:
    if value is None:
        return None
    text = value.decode("ascii", "replace") if isinstance(value, bytes) else ""
    epoch, _, digest = text.partition(":")
    try:
        version = Version(Epoch(int(epoch)), bytes.fromhex(digest))
    except ValueError:
        version = NO_RING
    if _text(version).encode() != value:
        raise CacheError("the ring kept in Redis cannot be read: its version is none of ours")
    return version


def _node_of(value: object) -> NodeSpec | None:
    """None as well for what a newer release wrote and we cannot read."""
    if not isinstance(value, bytes):
        return None
    try:
        return msgspec.json.decode(value, type=NodeSpec)
    except (msgspec.DecodeError, UnicodeDecodeError, CacheError):
        return None
