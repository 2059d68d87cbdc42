"""A real Redis that is not there, stands still, loses everything, refuses, or is full: nodes serve on."""

import asyncio
import logging
import time
from pathlib import Path

import pytest

from cachemgr.cluster.control.trouble import ControlTrouble
from cachemgr.ring import first_state, set_replicas
from tests.cachemgr.cluster.members.rig import Network, Node, eventually, spec
from tests.redis_server import RedisServer

A, B, C = spec("a", 7001), spec("b", 7002), spec("c", 7003)
RING = "tensorcache:test:ring"


async def pair(network: Network, server: RedisServer, *, timeout_s: float = 5.0) -> tuple[Node, Node]:
    a = await network.redis(A, server.url, timeout_s=timeout_s).start()
    b = await network.redis(B, server.url, timeout_s=timeout_s).start()
    await eventually(lambda: a.version == b.version)
    return a, b


def version_kept(server: RedisServer) -> bytes:
    return server.command("HGET", RING, "version")


def membership_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.message.startswith("membership:")]


def test_not_there_at_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        server = RedisServer(tmp_path)
        async with Network(tmp_path) as network:
            a = await network.redis(A, server.url).start()
            b = await network.redis(B, server.url).start()
            assert (a.names, b.names) == (["a"], ["b"])  # each serves alone
            assert a.members.trouble.startswith(f"Redis at 127.0.0.1:{server.port} is not there: ")
            assert a.members.trouble.endswith("; living on ring 1, the last one known")
            with server:
                await eventually(lambda: a.names == b.names == ["a", "b"] and a.version == b.version)
                await eventually(lambda: a.members.trouble == b.members.trouble == "")
                await network.close()

    caplog.set_level(logging.INFO)
    asyncio.run(run())
    lines = membership_lines(caplog)
    assert sum("is not there" in line for line in lines) == 2  # one line a node when it begins …
    assert sum("all is well again" in line for line in lines) == 2  # … and one when it ends
    assert len(lines) == 4


def test_not_there_at_start_with_a_ring_on_disk(tmp_path: Path, redis_server: RedisServer) -> None:
    async def run() -> None:
        async with Network(tmp_path) as network:
            _, b = await pair(network, redis_server)
            known = b.version
            await b.members.close()
            redis_server.kill()
            again = await network.redis(B, redis_server.url).start()
            assert (again.version, again.names) == (known, ["a", "b"])
            assert set(await again.members.nodes()) == {"a", "b"}

    asyncio.run(run())


def test_stopped_and_continued(
    tmp_path: Path, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with Network(tmp_path) as network:
            a, b = await pair(network, redis_server, timeout_s=1.0)
            known = a.version
            redis_server.pause()
            await eventually(lambda: "does not answer within 1 s; living on ring 2" in a.members.trouble)
            began = time.monotonic()
            with pytest.raises(ControlTrouble, match=r"does not answer.*; the ring may not have been chan"):
                await a.members.publish(set_replicas(a.state, 3), replaces=known)
            assert set(await a.members.nodes()) == {"a", "b"}
            assert time.monotonic() - began < 6.0
            assert a.version == known
            late = await network.redis(C, redis_server.url, timeout_s=1.0).start()  # within its bound, alone
            assert late.names == ["c"]
            redis_server.resume()
            await eventually(lambda: a.names == late.names == ["a", "b", "c"])
            await eventually(lambda: not any((a.members.trouble, b.members.trouble, late.members.trouble)))

    caplog.set_level(logging.INFO)
    asyncio.run(run())
    assert len(membership_lines(caplog)) == 6


def test_killed_and_restarted_empty(tmp_path: Path, redis_server: RedisServer) -> None:
    async def run() -> None:
        async with Network(tmp_path) as network:
            a, b = await pair(network, redis_server)
            await a.members.publish(set_replicas(a.state, 2), replaces=a.version)
            await eventually(lambda: a.version == b.version)
            known, kept = a.version, version_kept(redis_server)
            redis_server.kill()
            await eventually(lambda: a.members.trouble)
            redis_server.start()
            await eventually(lambda: version_kept(redis_server) == kept)
            await eventually(lambda: not a.members.trouble and not b.members.trouble)
            assert a.version == b.version == known
            assert set(await a.members.nodes()) == {"a", "b"}

    asyncio.run(run())


def test_flushed_while_a_new_node_starts(tmp_path: Path, redis_server: RedisServer) -> None:
    async def run() -> None:
        async with Network(tmp_path) as network:
            a, b = await pair(network, redis_server)
            await a.members.publish(set_replicas(a.state, 2), replaces=a.version)
            await eventually(lambda: a.version == b.version)
            redis_server.command("FLUSHALL")
            c = await network.redis(C, redis_server.url).start()
            await eventually(lambda: a.names == b.names == c.names == ["a", "b", "c"])
            await eventually(lambda: a.version == b.version == c.version)
            assert a.state.replicas == 2

    asyncio.run(run())


def test_a_lower_ring_is_replaced_and_a_higher_one_taken(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    async def run() -> None:
        async with Network(tmp_path) as network:
            a, b = await pair(network, redis_server)
            kept = version_kept(redis_server)
            older = await network.redis(C, redis_server.url).members._store.replace(  # type: ignore[attr-defined]
                a.version, first_state([A], replicas=1)
            )
            assert older is None
            await eventually(lambda: version_kept(redis_server) == kept)
            b.rings.install(set_replicas(b.state, 3))  # as if a peer had shown it
            await eventually(lambda: a.state.replicas == 3)

    asyncio.run(run())


def test_what_is_no_ring_is_left_alone_and_said(tmp_path: Path, redis_server: RedisServer) -> None:
    async def run() -> None:
        async with Network(tmp_path) as network:
            a, _ = await pair(network, redis_server)
            for version in ("x", "00000000000000000099:" + "00" * 16):
                redis_server.command("HSET", RING, "version", version, "state", "{}")
                await eventually(lambda: "the ring kept in Redis cannot be read" in a.members.trouble)
                assert a.members.trouble.endswith("; living on ring 2, the last one known")
                assert version_kept(redis_server) == version.encode()
                redis_server.command("DEL", RING)
                await eventually(lambda: not a.members.trouble)
            redis_server.command("HSET", RING, "version", "x", "state", "{}")
            with pytest.raises(ControlTrouble, match=r"cannot be read.*; the ring was not changed"):
                await a.members.publish(set_replicas(a.state, 3), replaces=a.version)

    asyncio.run(run())


def test_a_wrong_password_is_said_without_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        with RedisServer(tmp_path, "--requirepass", "right-one") as server:
            async with Network(tmp_path) as network:
                wrong = server.url.replace("//", "//:wrong-one@")
                a = await network.redis(A, wrong).start()
                assert f"127.0.0.1:{server.port} refuses this user name and password" in a.members.trouble
                b = await network.redis(B, server.url).start()
                assert "Authentication required" in b.members.trouble or "refuses" in b.members.trouble
                c = await network.redis(C, server.url.replace("//", "//:right-one@")).start()
                assert (c.members.trouble, c.names) == ("", ["c"])
                assert "wrong-one" not in caplog.text + a.members.trouble + repr(vars(a.members))
                assert "right-one" not in caplog.text + repr(vars(c.members))

    caplog.set_level(logging.DEBUG)
    asyncio.run(run())


def test_a_user_that_may_do_the_least(tmp_path: Path, redis_server: RedisServer) -> None:
    commands = ("+hget", "+hset", "+set", "+sadd", "+srem", "+smembers", "+mget", "+del", "+eval")
    rules = ("on", ">least", "resetkeys", "~tensorcache:test:*", "resetchannels", "-@all", *commands)
    assert redis_server.command("ACL", "SETUSER", "tensorcache", *rules) == b"+OK"

    async def run() -> None:
        async with Network(tmp_path) as network:
            url = redis_server.url.replace("//", "//tensorcache:least@")
            a = await network.redis(A, url).start()
            b = await network.redis(B, url).start()
            assert await b.members.publish(set_replicas(b.state, 2), replaces=b.version) is None
            await eventually(lambda: a.version == b.version)
            redis_server.command("DEL", "tensorcache:test:node:b")
            assert set(await a.members.nodes()) <= {"a", "b"}
            assert (a.members.trouble, b.members.trouble) == ("", "")
            assert redis_server.command("ACL", "LOG") == b"*0\r\n"  # nothing else was even tried
            redis_server.command("ACL", "SETUSER", "tensorcache", "-set")
            await eventually(lambda: "does not permit what is needed" in a.members.trouble)
            assert "'set'" in a.members.trouble

    asyncio.run(run())


def test_full_without_eviction(tmp_path: Path) -> None:
    async def run() -> None:
        with RedisServer(tmp_path, "--maxmemory", "3mb", "--maxmemory-policy", "noeviction") as server:
            async with Network(tmp_path) as network:
                a, b = await pair(network, server)
                server.command("CONFIG", "SET", "maxmemory", "1")
                await eventually(lambda: f"Redis at 127.0.0.1:{server.port} is full" in a.members.trouble)
                with pytest.raises(ControlTrouble, match=r"is full.*; the ring was not changed"):
                    await a.members.publish(set_replicas(a.state, 3), replaces=a.version)
                assert a.state.replicas == 1
                server.command("CONFIG", "SET", "maxmemory", "0")
                await eventually(lambda: not a.members.trouble)
                assert await a.members.publish(set_replicas(a.state, 3), replaces=a.version) is None
                await eventually(lambda: b.version == a.version)

    asyncio.run(run())
