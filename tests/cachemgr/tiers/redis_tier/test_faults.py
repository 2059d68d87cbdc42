"""Whatever happens to a real Redis: calls end in time with right blocks or a miss, and it is found back."""

import asyncio
import logging
import time
from pathlib import Path

import pytest

from cachemgr.host_contract import HostStore
from tests.cachemgr.host import Host
from tests.cachemgr.tiers.redis_tier.rig import (
    CALL_S,
    asked_until_down,
    in_time,
    tier_at,
    until_down,
    until_usable,
)
from tests.cachemgr.tiers.rig import WIDE, Pair, addresses, chain_of, eventually, soon, whole_run
from tests.redis_server import RedisServer

BLOCKS = 20
BREAKER = "cachemgr.breaker"


def breaker_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == BREAKER]


def test_not_there_at_the_start(
    host: Host, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, BREAKER)

    async def run() -> None:
        pair = Pair(host)
        redis_server.kill()
        async with tier_at(redis_server.url) as tier:
            await until_down(tier)
            assert await tier.known(pair.far.store, pair.blocks, deadline=soon()) == 0
            assert await pair.fetch(tier) == 0
            tier.put(pair.near.store, pair.blocks)
            assert tier.counters()["breaker_open"] == 1
            redis_server.start()
            await until_usable(tier)
            await eventually(lambda: tier.counters()["put_blocks_total"] == BLOCKS)
            assert await pair.fetch(tier) == BLOCKS

    asyncio.run(run())
    down, back = breaker_lines(caplog)
    assert down.startswith(f"Redis at 127.0.0.1:{redis_server.port} is down (is not there: ")
    assert back.startswith(f"Redis at 127.0.0.1:{redis_server.port} answers again after ")


def test_a_wrong_password_is_said_once_without_it(
    host: Host, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    async def run(server: RedisServer) -> None:
        pair = Pair(host)
        async with tier_at(server.url.replace("//", "//default:hunter2@"), breaker_s=0.05) as tier:
            await until_down(tier)
            troubles = tier.counters()["troubles_total"]
            await eventually(lambda: tier.counters()["troubles_total"] >= troubles + 3)
            assert await pair.fetch(tier) == 0
            server.command("CONFIG", "SET", "requirepass", "hunter2", password="other")
            await until_usable(tier)
            await pair.keep(tier)
            assert await pair.fetch(tier) == BLOCKS

    with RedisServer(tmp_path, "--requirepass", "other") as server:
        asyncio.run(run(server))
    down, _ = breaker_lines(caplog)
    assert "refuses this user name and password" in down
    assert "hunter2" not in caplog.text


def test_stopped_in_mid_load_and_continued(host: Host, redis_server: RedisServer) -> None:
    async def run() -> None:
        pair = Pair(host, block_format=WIDE)
        async with tier_at(redis_server.url, window_bytes=1 << 19) as tier:
            await pair.keep(tier)

            def stop_after_three(nbytes: int) -> None:
                pair.arrived.append(nbytes)
                if len(pair.arrived) == 3:
                    redis_server.pause()

            await in_time(
                lambda: tier.get(pair.far.store, pair.blocks, deadline=soon(60), arrived=stop_after_three),
                limit_s=2 * CALL_S,
            )
            assert 3 <= pair.whole() < BLOCKS
            await asked_until_down(tier, pair)
            redis_server.resume()
            await until_usable(tier)
            assert await pair.fetch(tier) == BLOCKS

    asyncio.run(run())


def test_stopped_while_it_is_written_to(host: Host, redis_server: RedisServer) -> None:
    """What is pinned while it is written is let go, however that ends."""

    async def run() -> None:
        pair = Pair(host, block_format=WIDE)
        async with tier_at(redis_server.url, batch_bytes=1 << 19) as tier:
            await pair.keep(tier, pair.blocks[:1])
            redis_server.pause()
            tier.put(pair.near.store, pair.blocks)
            await until_down(tier)
            assert pair.near.store.drop(pair.names) == BLOCKS, "nothing is pinned"
            redis_server.resume()
            await until_usable(tier)

    asyncio.run(run())


def test_found_down_without_a_request(host: Host, redis_server: RedisServer) -> None:
    async def run() -> None:
        async with tier_at(redis_server.url) as tier:
            await eventually(lambda: tier.usable)
            redis_server.pause()
            await until_down(tier)
            redis_server.resume()
            await until_usable(tier)

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["cancelled", "out of time"])
def test_a_get_that_ended_early_and_another_block_on_the_same_connection(
    host: Host, redis_server: RedisServer, kind: str
) -> None:
    """The server answers the first question after the second was asked: its answer must not be taken."""

    async def run() -> None:
        pair = Pair(host)
        other = chain_of(pair.near, 4, seed=5)
        async with tier_at(redis_server.url, connections=1, call_s=5.0) as tier:
            await pair.keep(tier)
            await pair.keep(tier, addresses(other))
            for _ in range(5):
                pair.far.store.drop([*pair.names, *other])
                redis_server.pause()
                seconds = (
                    0.04 if kind == "out of time" else 5.0
                )  # the breaker does not blame the server for it
                first = asyncio.create_task(pair.fetch(tier, seconds=seconds))
                await asyncio.sleep(0.02)
                if kind == "cancelled":
                    first.cancel()
                await asyncio.gather(first, return_exceptions=True)
                redis_server.resume()
                await tier.get(pair.far.store, addresses(other), deadline=soon(), arrived=bool)
                assert whole_run(pair.far.store, other) == 4
                assert pair.far.store.missing(pair.names) == list(range(BLOCKS))
            assert tier.counters()["corrupt_blocks_total"] == 0, "not one came under another's name"

    asyncio.run(run())


def test_full_without_eviction(host: Host, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run(server: RedisServer) -> None:
        pair = Pair(host, blocks=40, block_format=WIDE)
        async with tier_at(server.url, call_s=5.0) as tier:
            tier.put(pair.near.store, pair.blocks)
            await eventually(lambda: tier.counters()["queue_blocks"] == 0)
            await eventually(lambda: tier.counters()["put_refused_total"] > 0)
            kept = int(tier.counters()["put_blocks_total"])
            assert 0 < kept < 40
            assert tier.usable, "what is there can be read"
            assert tier.counters()["breaker_opened_total"] == 0
            assert await pair.fetch(tier) == kept
            for _ in range(3):
                tier.put(pair.near.store, pair.blocks)
                await eventually(lambda: tier.counters()["queue_blocks"] == 0)
            server.command("CONFIG", "SET", "maxmemory", "0")
            while tier.counters()["put_blocks_total"] < 40:
                tier.put(pair.near.store, pair.blocks)
                await asyncio.sleep(0.05)
            assert await pair.fetch(tier) == 40

    with RedisServer(tmp_path, "--maxmemory", "7mb", "--maxmemory-policy", "noeviction") as server:
        asyncio.run(run(server))
    lines = [record.getMessage() for record in caplog.records if "blocks are kept" in record.getMessage()]
    assert len(lines) == 1
    assert "is full: raise its maxmemory" in lines[0]


def test_flushed(host: Host, redis_server: RedisServer) -> None:
    """What was there a moment ago is offered again, once it was missed."""

    async def run() -> None:
        pair = Pair(host)
        async with tier_at(redis_server.url) as tier:
            await pair.keep(tier)
            redis_server.command("FLUSHALL")
            assert await pair.fetch(tier) == 0
            assert await tier.known(pair.far.store, pair.blocks, deadline=soon()) == 0
            await pair.keep(tier)
            assert await pair.fetch(tier) == BLOCKS

    asyncio.run(run())


def test_killed_and_started_anew(host: Host, redis_server: RedisServer) -> None:
    async def run() -> None:
        pair = Pair(host)
        async with tier_at(redis_server.url) as tier:
            await pair.keep(tier)
            redis_server.kill()
            await asked_until_down(tier, pair)
            assert await pair.fetch(tier) == 0
            redis_server.start()
            await until_usable(tier)
            assert await tier.known(pair.far.store, pair.blocks, deadline=soon()) == 0
            await pair.keep(tier)
            assert await pair.fetch(tier) == BLOCKS

    asyncio.run(run())


def test_started_anew_before_anybody_asked(host: Host, redis_server: RedisServer) -> None:
    """No request failed: that it is empty is seen from the connections that are gone."""

    async def run() -> None:
        pair = Pair(host)
        async with tier_at(redis_server.url) as tier:
            await pair.keep(tier)
            redis_server.kill()
            redis_server.start()
            deadline = soon()
            while redis_server.command("DBSIZE") != b":%d" % BLOCKS:
                tier.put(pair.near.store, pair.blocks)  # it is used again and again
                assert time.monotonic() < deadline, tier.counters()
                await asyncio.sleep(0.02)

    asyncio.run(run())


def test_killed_again_and_again_under_load(host: Host, redis_server: RedisServer) -> None:
    async def run() -> None:
        pair = Pair(host, block_format=WIDE)
        async with tier_at(redis_server.url, window_bytes=1 << 20, batch_bytes=1 << 20) as tier:
            for after in range(6):
                await until_usable(tier)
                pair.far.store.drop(pair.names)
                await pair.keep(tier)
                seen: list[int] = []
                loading = asyncio.create_task(
                    tier.get(pair.far.store, pair.blocks, deadline=soon(), arrived=seen.append)
                )
                tier.put(pair.near.store, pair.blocks)
                await eventually(lambda enough=after, got=seen: len(got) >= enough)
                redis_server.kill()
                await in_time(lambda task=loading: task, limit_s=2 * CALL_S)
                assert pair.whole() >= after
                await until_down(tier)
                redis_server.start()
        held = pair.far.store.blocks
        assert pair.far.store.drop(pair.names) == held, "nothing is pinned"
        pair.near.give(pair.far, pair.names)
        assert pair.whole() == BLOCKS, "every slot that was reserved was given back"

    asyncio.run(run())


def test_a_replica_is_promoted(host: Host, tmp_path: Path, redis_server: RedisServer) -> None:
    """A replica is left alone; promoted, it has what its master had."""

    async def run(replica: RedisServer) -> None:
        pair = Pair(host)
        async with tier_at(redis_server.url) as tier:
            await pair.keep(tier)
        async with tier_at(replica.url) as tier:
            await until_down(tier)
            assert await pair.fetch(tier) == 0
            await eventually(lambda: replica.command("DBSIZE") == b":%d" % BLOCKS)
            redis_server.kill()
            replica.command("REPLICAOF", "NO", "ONE")
            await until_usable(tier)
            assert await pair.fetch(tier) == BLOCKS

    redis_server.command("CONFIG", "SET", "repl-diskless-sync-delay", "0")
    (tmp_path / "replica").mkdir()
    with RedisServer(tmp_path / "replica", "--replicaof", f"127.0.0.1 {redis_server.port}") as replica:
        asyncio.run(run(replica))


def test_a_store_goes_away_in_mid_load(host: Host, redis_server: RedisServer) -> None:
    async def run() -> None:
        pair = Pair(host, block_format=WIDE)
        store: HostStore = pair.far.store
        async with tier_at(redis_server.url, window_bytes=1 << 19, call_s=5.0) as tier:
            await pair.keep(tier)
            seen: list[int] = []
            loading = asyncio.create_task(tier.get(store, pair.blocks, deadline=soon(), arrived=seen.append))
            await eventually(lambda: len(seen) >= 2)
            await tier.forget(store)
            came = len(seen)
            await in_time(lambda: loading, limit_s=CALL_S)
            assert len(seen) == came
            assert pair.whole() == came
            assert await pair.fetch(tier) == BLOCKS
            assert tier.counters()["troubles_total"] == 0

    asyncio.run(run())


def test_requests_with_little_time_make_the_tier_look_for_itself(
    host: Host, redis_server: RedisServer
) -> None:
    """None of them waits long enough to blame the server, and the next look would be in twelve seconds."""

    async def run() -> None:
        pair = Pair(host)
        async with tier_at(redis_server.url, breaker_s=60.0) as tier:
            await pair.keep(tier)
            redis_server.pause()
            await tier.known(pair.far.store, pair.blocks, deadline=soon(0.005))
            await eventually(lambda: not tier.usable, limit_s=8.0)
            redis_server.resume()

    asyncio.run(run())
