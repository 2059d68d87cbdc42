"""Values that are not the block that was asked for: a miss, removed, counted; the rest stays right."""

import asyncio
from collections.abc import Callable

import pytest

from tests.cachemgr.host import Host
from tests.cachemgr.tiers.redis_tier.rig import key_of, tier_at, value_of
from tests.cachemgr.tiers.rig import WIDE, Pair, eventually, soon
from tests.redis_server import RedisServer

BLOCKS = 20
WRONG_AT = 7

Spoil = Callable[[Pair], bytes]


def flipped(at: int) -> Spoil:
    def spoil(pair: Pair) -> bytes:
        value = bytearray(value_of(pair, WRONG_AT))
        value[at] ^= 0x10
        return bytes(value)

    return spoil


WRONG: dict[str, Spoil] = {
    "truncated by one": lambda pair: value_of(pair, WRONG_AT)[:-1],
    "truncated to half": lambda pair: value_of(pair, WRONG_AT)[: WIDE.payload_nbytes // 2],
    "truncated in the header": lambda pair: value_of(pair, WRONG_AT)[:100],
    "empty": lambda pair: b"",
    "longer": lambda pair: value_of(pair, WRONG_AT) + bytes(200_000),
    "another block's": lambda pair: value_of(pair, WRONG_AT + 1),
    "another header": lambda pair: value_of(pair, WRONG_AT + 1)[:128] + value_of(pair, WRONG_AT)[128:],
    "another payload": lambda pair: value_of(pair, WRONG_AT)[:128] + value_of(pair, WRONG_AT + 1)[128:],
    "no shard": lambda pair: b"x" * (128 + WIDE.payload_nbytes),
    "lines": lambda pair: b"$-1\r\n" * 1000,
    "flipped in the magic": flipped(9),
    "flipped in the name": flipped(40),
    "flipped in the tag": flipped(120),
    "flipped at the first byte": flipped(128),
    "flipped at the last byte": flipped(-1),
}


@pytest.mark.parametrize("spoil", WRONG.values(), ids=WRONG)
def test_a_wrong_value(host: Host, redis_server: RedisServer, spoil: Spoil) -> None:
    async def run() -> None:
        pair = Pair(host, block_format=WIDE)
        wrong = pair.blocks[WRONG_AT]
        async with tier_at(redis_server.url, connections=1, call_s=5.0) as tier:
            await pair.keep(tier)
            redis_server.command("SET", key_of(pair, wrong), spoil(pair))
            assert await pair.fetch(tier) == WRONG_AT
            assert pair.far.store.missing(pair.names) == list(range(WRONG_AT, BLOCKS))
            assert tier.counters()["corrupt_blocks_total"] == 1
            await eventually(lambda: tier.counters()["removed_blocks_total"] == 1)
            assert redis_server.command("EXISTS", key_of(pair, wrong)) == b":0"
            assert tier.counters()["troubles_total"] == 0
            rest = pair.blocks[WRONG_AT + 1 :]
            await tier.get(pair.far.store, rest, deadline=soon(), arrived=bool)
            pair.whole()
            assert pair.far.store.missing(pair.names) == [WRONG_AT]
            await pair.keep(tier)  # the writer puts the right one in its place
            assert await pair.fetch(tier) == BLOCKS

    asyncio.run(run())


def test_an_unknown_version_is_left_alone(host: Host, redis_server: RedisServer) -> None:
    async def run() -> None:
        pair = Pair(host)
        block = pair.blocks[WRONG_AT]
        newer = bytearray(value_of(pair, WRONG_AT))
        newer[12] = 99
        async with tier_at(redis_server.url, call_s=5.0) as tier:
            await pair.keep(tier)
            redis_server.command("SET", key_of(pair, block), bytes(newer))
            assert await pair.fetch(tier) == WRONG_AT
            assert tier.counters()["unreadable_blocks_total"] == 1
            assert tier.counters()["corrupt_blocks_total"] == 0
            tier.put(pair.near.store, pair.blocks)
            await eventually(lambda: tier.counters()["queue_blocks"] == 0)
            assert redis_server.command("GET", key_of(pair, block)) == bytes(newer)

    asyncio.run(run())


def test_a_key_of_another_type(host: Host, redis_server: RedisServer) -> None:
    """Nobody of ours puts one there: the breaker hears that reading does not work."""

    async def run() -> None:
        pair = Pair(host)
        key = key_of(pair, pair.blocks[WRONG_AT])
        async with tier_at(redis_server.url, call_s=5.0) as tier:
            await pair.keep(tier)
            redis_server.command("DEL", key)
            redis_server.command("LPUSH", key, "x")
            assert await pair.fetch(tier) == WRONG_AT

    asyncio.run(run())


def test_what_is_read_lives_on(host: Host, redis_server: RedisServer) -> None:
    async def run() -> None:
        pair = Pair(host)
        async with tier_at(redis_server.url, ttl_s=1000.0, call_s=5.0) as tier:
            await pair.keep(tier)
            keys = [key_of(pair, block) for block in pair.blocks]
            for key in keys:
                assert 900 < int(redis_server.command("TTL", key)[1:]) <= 1000
                redis_server.command("EXPIRE", key, "100")
            assert await pair.fetch(tier) == BLOCKS
            assert all(int(redis_server.command("TTL", key)[1:]) > 900 for key in keys)

    asyncio.run(run())


def test_what_is_offered_by_another_node_lives_on_and_moves_no_bytes(
    host: Host, redis_server: RedisServer
) -> None:
    async def run() -> None:
        pair = Pair(host)
        async with tier_at(redis_server.url) as tier, tier_at(redis_server.url, ttl_s=5000.0) as other:
            await pair.keep(tier)
            await pair.keep(other)
            assert other.counters()["put_blocks_total"] == 0
            assert other.counters()["put_known_total"] == BLOCKS
            assert int(redis_server.command("TTL", key_of(pair, pair.blocks[0]))[1:]) > 4000

    asyncio.run(run())
