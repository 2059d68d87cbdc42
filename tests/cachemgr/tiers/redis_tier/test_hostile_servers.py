"""Who answers is no Redis, or only half of one: each call ends within its deadline, and is a miss."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from tests.cachemgr.host import Host
from tests.cachemgr.tiers.redis_tier.rig import CALL_S, in_time, tier_at, until_down, until_usable, value_of
from tests.cachemgr.tiers.rig import WIDE, Pair, soon
from tests.redis_server import RedisServer

BLOCKS = 20
SHARD = 128 + WIDE.payload_nbytes

Behave = Callable[[asyncio.StreamReader, asyncio.StreamWriter, bytes], Awaitable[None]]
"""Answers `GETEX`s; the bytes are those of block 0's value."""


@asynccontextmanager
async def server_that(behave: Behave, value: bytes, *, probes: bool = True) -> AsyncIterator[str]:
    """Answers the looks of the tier as a Redis does, if `probes`, and runs like that; its URL."""
    open_writers: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_writers.add(writer)
        try:
            while question := await reader.read(1 << 16):
                if question.startswith(b"*2\r\n$6\r\nEXISTS") and b":probe\r\n" in question and probes:
                    writer.write(b":0\r\n$-1\r\n")
                elif question.startswith(b"*2\r\n$6\r\nEXISTS") and probes:
                    writer.write(b":1\r\n" * question.count(b"EXISTS"))
                else:
                    await behave(reader, writer, value)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            open_writers.discard(writer)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in list(open_writers):
            writer.transport.abort()
        await asyncio.sleep(0.05)


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, value: bytes) -> None:
    await asyncio.sleep(3600)


async def half_and_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, value: bytes) -> None:
    writer.write(b"$%d\r\n" % len(value) + value[: len(value) // 2])
    await asyncio.sleep(3600)


async def half_and_gone(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, value: bytes) -> None:
    writer.write(b"$%d\r\n" % len(value) + value[: len(value) // 2])
    writer.close()


async def half_a_header(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, value: bytes) -> None:
    writer.write(b"$%d\r\n" % len(value) + value[:50])
    await asyncio.sleep(3600)


async def trickling(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, value: bytes) -> None:
    data = b"$%d\r\n" % len(value) + value
    for start in range(len(data)):
        writer.write(data[start : start + 1])
        await asyncio.sleep(0.005)


async def garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, value: bytes) -> None:
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")


async def endless_line(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, value: bytes) -> None:
    writer.write(b"$" + b"1" * 100_000)


async def huge(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, value: bytes) -> None:
    writer.write(b"$9223372036854775807\r\n" + bytes(1 << 20))


async def integers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, value: bytes) -> None:
    writer.write(b":1\r\n" * 100)


async def nested(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, value: bytes) -> None:
    writer.write(b"*1\r\n" * 10_000)


async def too_many(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, value: bytes) -> None:
    writer.write(b"$-1\r\n" * 1000)


KINDS = [
    silent, half_and_silent, half_and_gone, half_a_header, trickling, garbage, endless_line, huge, integers,
    nested, too_many,
]  # fmt: skip


@pytest.mark.parametrize("behave", KINDS, ids=lambda behave: behave.__name__)
def test_a_get_ends_in_time(host: Host, behave: Behave) -> None:
    async def run() -> None:
        pair = Pair(host, block_format=WIDE)
        async with server_that(behave, value_of(pair, 0)) as url, tier_at(url) as tier:
            for _ in range(4):
                found = await in_time(
                    lambda: tier.get(
                        pair.far.store, pair.blocks, deadline=soon(CALL_S), arrived=pair.arrived.append
                    ),
                    limit_s=CALL_S,
                )
                assert found is None
                assert pair.whole() == len(pair.arrived) == 0
        pair.near.give(pair.far, pair.names)
        assert pair.whole() == BLOCKS, "every slot that was reserved was given back"

    asyncio.run(run())


@pytest.mark.parametrize("behave", KINDS, ids=lambda behave: behave.__name__)
def test_what_answers_nothing_right_is_left_alone(host: Host, behave: Behave) -> None:
    """Looks included: the breaker opens without a request, and no question outlives its deadline."""

    async def run() -> None:
        pair = Pair(host, block_format=WIDE)
        async with server_that(behave, value_of(pair, 0), probes=False) as url, tier_at(url) as tier:
            await until_down(tier)
            known = await in_time(
                lambda: tier.known(pair.far.store, pair.blocks, deadline=soon(CALL_S)), limit_s=CALL_S
            )
            assert known == 0
            tier.put(pair.near.store, pair.blocks)
            assert pair.near.store.drop(pair.names) == BLOCKS, "nothing is pinned"

    asyncio.run(run())


def test_a_trickle_is_no_progress(host: Host) -> None:
    """With a far deadline, too: the next block has to come within `call_s`."""

    async def run() -> None:
        pair = Pair(host, block_format=WIDE)
        async with server_that(trickling, value_of(pair, 0)) as url, tier_at(url) as tier:
            await in_time(
                lambda: tier.get(pair.far.store, pair.blocks, deadline=soon(600), arrived=bool),
                limit_s=CALL_S,
            )
            assert tier.counters()["timeouts_total"] == 1

    asyncio.run(run())


def test_slow_is_not_down(host: Host, redis_server: RedisServer) -> None:
    """Each block comes 20 ms after the last: what came by the deadline is used, and nobody is blamed."""

    async def run() -> None:
        pair = Pair(host, block_format=WIDE)
        values = [value_of(pair, index) for index in range(BLOCKS)]

        async def slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, value: bytes) -> None:
            for one in values:
                await asyncio.sleep(0.02)
                writer.write(b"$%d\r\n" % len(one) + one + b"\r\n")

        async with server_that(slowly, b"") as url, tier_at(url, call_s=5.0) as tier:
            async with asyncio.timeout(10):
                await tier.get(pair.far.store, pair.blocks, deadline=soon(0.2), arrived=pair.arrived.append)
            assert pair.whole() == len(pair.arrived) < BLOCKS
            assert tier.usable
            await until_usable(tier)

    asyncio.run(run())


def test_a_long_block_over_a_slow_link_is_nobodys_fault(host: Host) -> None:
    """The deadline comes in the midst of a block whose bytes keep coming, again and again."""

    async def run() -> None:
        pair = Pair(host, block_format=WIDE)

        async def thinly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, value: bytes) -> None:
            data = b"$%d\r\n" % len(value) + value
            for start in range(0, len(data), 1024):
                writer.write(data[start : start + 1024])
                await asyncio.sleep(0.002)

        async with server_that(thinly, value_of(pair, 0)) as url, tier_at(url, call_s=5.0) as tier:
            for _ in range(5):
                await tier.get(pair.far.store, pair.blocks, deadline=soon(0.15), arrived=bool)
            assert tier.counters()["timeouts_total"] == 5
            assert tier.counters()["troubles_total"] == 0
            assert tier.usable

    asyncio.run(run())
