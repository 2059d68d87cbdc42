"""A Redis that answers anything: RedisTrouble or CacheError, a miss, or the very block that was asked for."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

import msgspec

from cachemgr.cluster.members.redis_ring_store import RedisRingStore
from cachemgr.errors import CacheError
from cachemgr.redis_address import RedisAddress
from cachemgr.redis_client import RedisClient, RedisTrouble
from cachemgr.redis_client.line import RedisLine, SmallAnswers
from cachemgr.redis_client.redis_py import Login
from cachemgr.ring import NodeSpec, Version, encode_ring, first_state
from cachemgr.tiers.redis_tier.arriving import ArrivingRun
from cachemgr.tiers.redis_tier.counts import RedisCounts
from cachemgr.tiers.redis_tier.places import _ranges
from tests.fuzz.blocks import BLOCKS, HELD, SHARD_NBYTES, nodes
from tests.fuzz.contract import plain
from tests.fuzz.loop import run
from tests.fuzz.source import Source

_ADDRESS = RedisAddress("127.0.0.1", 6379)
_ME = NodeSpec("me", "host:1")
_STATE = first_state([_ME], replicas=0)
_VERSION = f"{_STATE.epoch:020d}:{_STATE.version.digest.hex()}".encode()


def _bulk(value: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(value), value)


_RUN = b"".join(_bulk(nodes().shard(index)) for index in range(HELD)) + b"$-1\r\n" * (BLOCKS - HELD)
_SLOTS = b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$1\r\nh\r\n:1\r\n"
EXAMPLES = (
    b"\x00\xff" + _RUN,
    b"\x00\x03" + _RUN,
    b"\x00\xff" + b"$-1\r\n" * BLOCKS,
    b"\x00\xff" + b"-MOVED 3999 127.0.0.1:6381\r\n" + b"-OOM command not allowed\r\n",
    b"\x00\xff" + b"$99999999999999999999\r\n",
    b"\x00\xff" + b"$%d\r\n" % (SHARD_NBYTES + 5),
    b"\x00\xff" + b"$+5\r\n*1\r\n:7\r\n",
    b"\x01\xff" + _SLOTS,
    b"\x01\xff" + b"*1\r\n" * 200,
    b"\x01\xff" + b"*2147483647\r\n$-1\r\n",
    b"\x01\xff" + b"%1\r\n*0\r\n:1\r\n",
    b"\x01\xff" + b"-MOVED a b c\r\n",
    b"\x02\xff" + _bulk(_VERSION) + _bulk(msgspec.json.encode(_ME)) + b":1\r\n",
    b"\x02\xff" + b":5\r\n:6\r\n:7\r\n",
    b"\x03\xff" + _bulk(encode_ring(_STATE)),
    b"\x03\xff" + b"*1\r\n$-1\r\n",
    b"\x04\xff" + b"*1\r\n$2\r\nme\r\n" + b"*1\r\n" + _bulk(msgspec.json.encode(_ME)) + b":1\r\n",
    b"\x04\xff" + b"*2\r\n:5\r\n$-1\r\n",
    b"\x05\xff" + _bulk(_VERSION),
)


class _Transport:
    """Takes whatever is sent."""

    def write(self, data: bytes) -> None:
        pass

    def is_closing(self) -> bool:
        return False


def target(data: bytes) -> None:
    source = Source(data)
    kind, piece, answers = source.byte() % 6, 1 + source.byte(), source.rest()
    try:
        if kind == 0:
            _fetch(answers, piece)
        elif kind == 1:
            for value in run(_values(answers, piece, expected=1)):
                if not isinstance(value, RedisTrouble):
                    for start, host, port in _ranges(value, _ADDRESS):
                        assert 0 <= start < 16384
                        assert isinstance(host, str)
                        assert isinstance(port, int)
        else:
            run(_ring_store(kind, answers, piece))
    except CacheError as error:
        plain(error)


def _fetch(answers: bytes, piece: int) -> None:
    here = nodes()
    counts = RedisCounts()
    arriving = ArrivingRun(
        here.far.store, here.addresses, [b"GET"] * BLOCKS, window=3, arrived=bool, counts=counts
    )
    try:
        run(_exchange(arriving, answers, piece))
    finally:
        arriving.drop()
        missing = here.far.store.missing(here.names)
        here.check()
        here.reset()
    assert missing == list(range(BLOCKS - len(missing), BLOCKS)), "the run has a hole"


async def _exchange(answers: Any, data: bytes, piece: int) -> None:
    """One exchange on a line whose other end says `data` and no more."""
    line = RedisLine(_ADDRESS, Login(_ADDRESS, timeout_s=1.0))
    line._transport = cast(Any, _Transport())
    asking = asyncio.create_task(line.ask(answers, deadline=asyncio.get_running_loop().time() + 60.0))
    await asyncio.sleep(0)
    rest = memoryview(data)
    while rest and not asking.done():
        room = line.get_buffer(-1)
        count = min(len(room), len(rest), piece)
        assert count, "no room"
        room[:count] = rest[:count]
        rest = rest[count:]
        line.buffer_updated(count)
        if line._ended is None or line._ended.done():
            await asyncio.sleep(0)
    line.connection_lost(None)
    await asking


async def _values(data: bytes, piece: int, *, expected: int) -> list[Any]:
    small = SmallAnswers([("GET", "x")] * expected)
    await _exchange(small, data, piece)
    return small.values


class _Client:
    """RedisClient over the answers in `data`."""

    address = _ADDRESS

    def __init__(self, data: bytes, piece: int) -> None:
        self._values = SmallAnswers(others=1 << 20)
        self._data, self._piece = data, piece

    async def answers(self) -> None:
        with suppress(RedisTrouble):  # there are no more
            await _exchange(self._values, self._data, self._piece)

    async def ask(self, *commands: Sequence[object]) -> list[Any]:
        values, count = self._values.values, len(commands)
        found, self._values.values = values[:count], values[count:]
        return found + [None] * (len(commands) - len(found))

    async def ask_one(self, *command: object) -> Any:
        [answer] = await self.ask(command)
        if isinstance(answer, RedisTrouble):
            raise answer
        return answer


async def _ring_store(kind: int, data: bytes, piece: int) -> None:
    client = _Client(data, piece)
    await client.answers()
    store = RedisRingStore(cast(RedisClient, client), cluster="c", alive_s=1.0)
    if kind == 2:
        beat = await store.beat(_ME)
        assert beat.held is None or isinstance(beat.held, Version)
    elif kind == 3:
        await store.read()
    elif kind == 4:
        for name, node in (await store.nodes()).items():
            assert isinstance(name, str)
            assert isinstance(node, NodeSpec)
    else:
        held = await store.replace(_STATE.version, _STATE)
        assert held is None or isinstance(held, Version)
