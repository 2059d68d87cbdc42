"""The client of Redis: addresses, deadlines, and texts without passwords."""

import asyncio
import logging
import time
from pathlib import Path

import pytest
from redis import exceptions

from cachemgr.errors import SettingsError
from cachemgr.redis_address import RedisAddress
from cachemgr.redis_client import RedisClient, RedisTrouble
from tests.cachemgr.cluster.certificates import make_certificates
from tests.free_ports import free_ports
from tests.redis_server import RedisServer


def test_parse() -> None:
    address = RedisAddress.parse("rediss://us%23er:p%40ss@redis.example:7000/3?ssl_ca_certs=/etc/ca.pem")
    assert (address.host, address.port, address.database, address.tls) == ("redis.example", 7000, 3, True)
    assert (address.username, address.password) == ("us#er", "p@ss")
    assert address.tls_files == {"ssl_ca_certs": "/etc/ca.pem"}
    assert str(RedisAddress.parse("redis://[::1]")) == "[::1]:6379"
    assert "p@ss" not in f"{address} {address!r}"


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://user:secret@h", "must be redis://host:port or rediss://host:port"),
        ("redis://", "must be redis://"),
        ("redis://:se#secret@h", "must "),
        ("redis://user:secret@h:99999", "must have a port up to 65535"),
        ("redis://user:secret@h/x", "must end in nothing or the number of a database"),
        ("redis://h?password=secret", "takes no options"),
        ("redis://h?ssl_ca_certs=x", "takes no options"),
        ("secret", "must be redis://"),
        (":secret@h:6379", "must be redis://"),
        ("redis:secret@h", "must be redis://"),
    ],
)
def test_what_is_no_address_is_refused_without_its_password(url: str, problem: str) -> None:
    with pytest.raises(SettingsError, match=f"^redis: {problem}") as refused:
        RedisAddress.parse(url)
    assert "secret@" not in str(refused.value)
    assert "=secret" not in str(refused.value)


def test_answers_come_as_they_are(redis_server: RedisServer) -> None:
    async def run() -> None:
        client = RedisClient(RedisAddress.parse(redis_server.url), timeout_s=2.0)
        asked = (("SET", "k", b"\x00\xff"), ("GET", "k"), ("LPUSH", "k", 1), ("STRLEN", "k"))
        answers = await client.ask(*asked)
        assert answers[0] in (b"OK", True)
        assert answers[1] == b"\x00\xff"
        assert isinstance(answers[2], RedisTrouble)
        assert answers[2].refused
        assert str(answers[2]).startswith(f"Redis at 127.0.0.1:{redis_server.port} refuses: ")
        assert answers[3] == 2
        with pytest.raises(RedisTrouble, match="refuses"):
            await client.ask_one("LPUSH", "k", 1)
        await client.close()
        await client.close()

    asyncio.run(run())


def test_a_silent_server_costs_the_deadline_and_the_next_answer_is_the_right_one(
    redis_server: RedisServer,
) -> None:
    async def run() -> None:
        client = RedisClient(RedisAddress.parse(redis_server.url), timeout_s=0.3)
        await client.ask_one("SET", "one", "1")
        redis_server.pause()
        began = time.monotonic()
        with pytest.raises(RedisTrouble, match=r"does not answer within 0\.3 s") as trouble:
            await client.ask_one("GET", "one")
        assert not trouble.value.refused
        cancelled = asyncio.create_task(client.ask_one("GET", "one"))
        await asyncio.sleep(0.05)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        assert time.monotonic() - began < 2.0
        redis_server.resume()
        assert await client.ask_one("GET", "two") is None  # not the late "1"
        assert await client.ask_one("GET", "one") == b"1"
        await client.close()

    asyncio.run(run())


def test_one_failure_after_a_restart_at_most(redis_server: RedisServer) -> None:
    async def run() -> None:
        client = RedisClient(RedisAddress.parse(redis_server.url), timeout_s=2.0)
        await client.ask_one("PING")
        redis_server.kill()
        for _ in range(2):
            with pytest.raises(RedisTrouble, match="is not there"):
                await client.ask_one("PING")
        redis_server.start()
        assert await client.ask_one("PING") in (b"PONG", True)
        await client.close()

    asyncio.run(run())


def test_no_text_has_the_password(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run(server: RedisServer) -> None:
        url = server.url.replace("//", "//default:hunter2@")
        client = RedisClient(RedisAddress.parse(url), timeout_s=2.0)
        with pytest.raises(RedisTrouble, match="refuses this user name and password") as refused:
            await client.ask_one("GET", "k")
        assert refused.value.refused
        with pytest.raises(RedisTrouble) as unsafe:
            raise client._trouble(OSError("never echo hunter2 here"))
        texts = [caplog.text, repr(client), str(unsafe.value), str(refused.value)]
        assert all("hunter2" not in text for text in texts)
        await client.close()

    caplog.set_level(logging.DEBUG)
    with RedisServer(tmp_path, "--requirepass", "other") as server:
        asyncio.run(run(server))


def test_tls_to_a_server_without_it_is_trouble(redis_server: RedisServer) -> None:
    async def run() -> None:
        client = RedisClient(RedisAddress.parse(redis_server.url.replace("redis:", "rediss:")), timeout_s=0.5)
        with pytest.raises(RedisTrouble):
            await client.ask_one("PING")
        await client.close()

    asyncio.run(run())


def test_tls_checks_the_server_and_shows_our_certificate(tmp_path: Path) -> None:
    ours, others = make_certificates(tmp_path / "ours"), make_certificates(tmp_path / "others")
    [port] = free_ports(1)
    own = ("--tls-cert-file", ours.tls_cert, "--tls-key-file", ours.tls_key)
    files = (*own, "--tls-ca-cert-file", ours.tls_ca)

    async def ask(ca: str, *, certificate: bool = True, host: str = "127.0.0.1") -> object:
        own = f"&ssl_certfile={ours.tls_cert}&ssl_keyfile={ours.tls_key}" if certificate else ""
        address = RedisAddress.parse(f"rediss://{host}:{port}?ssl_ca_certs={ca}{own}")
        client = RedisClient(address, timeout_s=5.0)
        try:
            return await client.ask_one("ECHO", "seen")
        finally:
            await client.close()

    with RedisServer(tmp_path, "--tls-port", str(port), "--tls-auth-clients", "yes", *files):
        assert asyncio.run(ask(ours.tls_ca)) == b"seen"
        with pytest.raises(RedisTrouble, match=r"does not prove who it is: .*certificate verify failed"):
            asyncio.run(ask(others.tls_ca))
        with pytest.raises(RedisTrouble, match=r"does not prove who it is: .*localhost"):
            asyncio.run(ask(ours.tls_ca, host="localhost"))
        with pytest.raises(RedisTrouble):
            asyncio.run(ask(ours.tls_ca, certificate=False))


def test_closing_never_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        client = RedisClient(RedisAddress.parse("redis://127.0.0.1:1"), timeout_s=0.3)

        async def gone() -> None:
            raise exceptions.TimeoutError("Timed out closing connection")

        with monkeypatch.context() as patched:
            patched.setattr(client._redis, "aclose", gone)
            await client.close()
        await client.close()

    asyncio.run(run())
