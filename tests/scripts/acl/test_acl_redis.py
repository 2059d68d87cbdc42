"""`tensorcache acl redis`: under its very rules each role does its work on a real Redis, and nothing else."""

import asyncio
import hashlib
import os
import socket
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cachemgr.redis_address import RedisAddress
from cachemgr.redis_client import RedisClient, RedisTrouble
from cachemgr.tiers.redis_tier import RedisTierSettings
from scripts.acl.redis_rules import ROLES
from scripts.cli import main
from tests.cachemgr.cluster.members.rig import Network, eventually, spec
from tests.cachemgr.host import Host
from tests.cachemgr.tiers.redis_tier.redis_cluster import running_cluster
from tests.cachemgr.tiers.redis_tier.rig import key_of, tier_at, until_usable
from tests.cachemgr.tiers.rig import Pair, soon
from tests.cachemgr.tiers.rig import eventually as it_happens
from tests.redis_server import RedisServer

BLOCKS = 20
CLUSTER = "test"
"""What the rigs of both call theirs."""


@pytest.fixture
def passwords(tmp_path: Path) -> Path:
    return tmp_path / "passwords"


@pytest.fixture
def acl(capsys: pytest.CaptureFixture[str], passwords: Path) -> Any:
    """Runs the verb; its lines."""

    def run(*words: str) -> list[str]:
        assert main(["acl", "redis", "--passwords", str(passwords), *words]) == 0
        return capsys.readouterr().out.splitlines()

    return run


@pytest.fixture
def guarded(acl: Any, tmp_path: Path) -> Iterator[RedisServer]:
    """A server that has been given the file, and no other users."""
    file = tmp_path / "users.acl"
    file.write_text("\n".join([*acl("--cluster", CLUSTER), "user admin on nopass ~* &* +@all", ""]))
    with RedisServer(tmp_path, "--aclfile", str(file)) as server:
        yield server


def url_of(server: RedisServer, role: str, passwords: Path) -> str:
    user = f"tensorcache-{role}"
    return server.url.replace("//", f"//{user}:{(passwords / user).read_text().strip()}@")


def settings_of(server: RedisServer, role: str, passwords: Path) -> dict[str, Any]:
    user = f"tensorcache-{role}"
    url = server.url.replace("//", f"//{user}@")
    return {"url": url, "password_file": str(passwords / user), "call_s": 5.0}


async def refused(url: str, *commands: Sequence[str | bytes]) -> list[bool]:
    client = RedisClient(RedisAddress.parse(url), timeout_s=5.0)
    answers = await client.ask(*commands)
    await client.close()
    return [isinstance(answer, RedisTrouble) and "does not permit" in str(answer) for answer in answers]


def test_a_writer_keeps_and_a_reader_brings(guarded: RedisServer, passwords: Path, host: Host) -> None:
    async def run() -> None:
        pair = Pair(host)
        async with tier_at(**settings_of(guarded, "writer", passwords)) as writer:
            await pair.keep(writer)
            assert await pair.fetch(writer) == BLOCKS
            pair.far.store.drop(pair.names)
            async with tier_at(**settings_of(guarded, "reader", passwords)) as reader:
                assert await reader.known(pair.far.store, pair.blocks, deadline=soon()) == BLOCKS
                assert await pair.fetch(reader) == BLOCKS
                assert reader.counters()["troubles_total"] == 0
                reader.put(pair.near.store, pair.blocks)
                await it_happens(lambda: reader.counters()["put_refused_total"] == BLOCKS)
                assert reader.usable, "it reads on"
                assert await reader.known(pair.far.store, pair.blocks, deadline=soon()) == BLOCKS
            assert writer.counters()["troubles_total"] == 0

    asyncio.run(run())


def test_a_writer_removes_what_is_wrong_and_a_reader_only_counts_it(
    guarded: RedisServer, passwords: Path, host: Host
) -> None:
    async def run() -> None:
        pair = Pair(host)
        wrong = ("SET", key_of(pair, pair.blocks[3]), "wrong")
        async with tier_at(**settings_of(guarded, "writer", passwords)) as writer:
            await pair.keep(writer)
            assert await refused(url_of(guarded, "writer", passwords), wrong) == [False]
            async with tier_at(**settings_of(guarded, "reader", passwords)) as reader:
                for times in (1, 2):
                    pair.far.store.drop(pair.names)
                    assert await pair.fetch(reader) == 3
                    assert reader.counters()["corrupt_blocks_total"] == times
                assert reader.counters()["removed_blocks_total"] == 0
                assert reader.usable
            assert await pair.fetch(writer) == 3
            await it_happens(lambda: writer.counters()["removed_blocks_total"] == 1)
            await pair.keep(writer)
            assert await pair.fetch(writer) == BLOCKS

    asyncio.run(run())


def test_membership(guarded: RedisServer, passwords: Path, tmp_path: Path) -> None:
    """Two nodes join, a third leaves: all that membership does."""

    async def run() -> None:
        async with Network(tmp_path) as network:
            url = url_of(guarded, "membership", passwords)
            a = await network.redis(spec("a", 7001), url).start()
            b = await network.redis(spec("b", 7002), url).start()
            await eventually(lambda: a.names == b.names == ["a", "b"])
            await b.members.close()
            client = RedisClient(RedisAddress.parse(url), timeout_s=5.0)
            assert await client.ask_one("SMEMBERS", f"tensorcache:{CLUSTER}:nodes") == [b"a"]
            await client.close()

    asyncio.run(run())


@pytest.mark.parametrize("role", list(ROLES))
def test_nothing_else_is_permitted(guarded: RedisServer, passwords: Path, role: str) -> None:
    mine = ROLES[role].keys.format(cluster=CLUSTER) + "x"
    not_mine = ROLES["reader" if role == "membership" else "membership"].keys.format(cluster=CLUSTER)
    others = ["other:kv:x", f"{CLUSTER}x:kv:x", "x", f"{not_mine}x"]
    never = [
        ("GET", mine), ("KEYS", "*"), ("SCAN", "0"), ("FLUSHALL",), ("CONFIG", "GET", "*"), ("ACL", "LIST"),
        ("MONITOR",), ("SUBSCRIBE", "x"), ("PUBLISH", "x", "y"), ("SHUTDOWN",),
        ("CLUSTER", "SLOTS"), ("SELECT", "1"), ("SCRIPT", "FLUSH"), ("RENAME", mine, mine + "y"),
        ("INFO",), ("CLIENT", "LIST"), ("REPLICAOF", "h", "1"), ("MODULE", "LIST"), ("COMMAND",),
    ]  # fmt: skip
    foreign = {
        "reader": [("GETEX", key) for key in others] + [("EXISTS", key) for key in others],
        "writer": [("SET", key, "v") for key in others] + [("UNLINK", key) for key in others],
        "membership": [("SET", key, "v") for key in others] + [("DEL", key) for key in others],
    }
    beyond_it = {
        "reader": [("SET", mine, "v"), ("PEXPIRE", mine, "1"), ("UNLINK", mine), ("DEL", mine)],
        "writer": [("EVAL", "return 1", "0"), ("HSET", mine, "a", "b")],
        "membership": [
            ("GETEX", mine),
            ("EVAL", "return redis.call('GET', KEYS[1])", "1", f"{CLUSTER}:kv:x"),
        ],
    }
    commands = [*never, *foreign[role], *beyond_it[role]]
    said = asyncio.run(refused(url_of(guarded, role, passwords), *commands))
    assert [command for command, no in zip(commands, said, strict=True) if not no] == []


def test_who_names_no_user_is_refused(guarded: RedisServer) -> None:
    assert guarded.command("PING").startswith(b"-NOAUTH")


def test_said_to_a_running_server_by_whom_it_ends(acl: Any, redis_server: RedisServer) -> None:
    """Every command is obeyed; afterwards whoever names no user can do nothing."""
    lines = acl("--cluster", CLUSTER, "--setuser")
    said = "".join(f"{line}\r\n" for line in lines).encode()
    with socket.create_connection(("127.0.0.1", redis_server.port), timeout=10) as door:
        door.sendall(said)
        answers = b""
        while answers.count(b"\r\n") < len(lines):
            answers += door.recv(4096)
    assert answers == b"+OK\r\n" * len(lines)
    assert redis_server.command("PING").startswith(b"-NOAUTH")


def test_in_a_redis_cluster(acl: Any, passwords: Path, host: Host, tmp_path: Path) -> None:
    lines = acl("--cluster", CLUSTER, "--cluster-mode", "--setuser", "--keep-default")

    async def run(url: str) -> None:
        pair = Pair(host)
        user = {role: f"tensorcache-{role}" for role in ROLES}
        options = {"cluster": True, "call_s": 5.0}
        of = {role: url.replace("//", f"//{user[role]}@") for role in ROLES}
        files = {role: str(passwords / user[role]) for role in ROLES}
        async with tier_at(of["writer"], password_file=files["writer"], **options) as writer:
            await until_usable(writer)
            await pair.keep(writer)
        async with tier_at(of["reader"], password_file=files["reader"], **options) as reader:
            await until_usable(reader)
            assert await pair.fetch(reader) == BLOCKS
            assert reader.counters()["troubles_total"] == 0

    with running_cluster(tmp_path) as cluster:
        for server in (*cluster.masters, cluster.replica):
            for line in lines:
                assert server.command(*line.split()) == b"+OK"
        asyncio.run(run(cluster.url))


def test_passwords_are_made_once_and_kept_to_ourselves(acl: Any, passwords: Path) -> None:
    first = acl("--cluster", "prod")
    assert first == acl("--cluster", "prod"), "the same passwords the second time"
    files = sorted(passwords.iterdir())
    assert [file.name for file in files] == sorted(f"tensorcache-{role}" for role in ROLES)
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    secrets = {file.read_text().strip() for file in files}
    assert len(secrets) == len(ROLES)
    assert not any(secret in "\n".join(first) for secret in secrets)


def test_a_password_of_ones_own(acl: Any, passwords: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine"
    file.write_text("hunter2\n")
    file.chmod(0o600)
    [line] = acl("--cluster", "prod", "--role", "reader", "--password-file", str(file), "--keep-default")
    assert "#f52fbd32b2b3b86ff88ef6c490628285f482af15ddcb29541f94bcf526a3f6c7" in line
    assert not passwords.exists()
    assert "+select" in acl("--cluster", "prod", "--database", "3")[0].split()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "--cluster: name the cluster"),
        (["--cluster", "a*b"], "--cluster: must be a-z"),
        (["--cluster", "a", "--password-file", "x"], "say whose with --role"),
        (["--cluster", "a", "--cluster-mode", "--database", "1"], "has no other than 0"),
        (
            ["--cluster", "a", "--role", "reader", "--password-file", "/nowhere"],
            "reading a password: /nowhere",
        ),
    ],
)
def test_what_cannot_be_is_one_line(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["acl", "redis", *words]) in (1, 2)
    assert text in capsys.readouterr().err


def test_a_password_that_others_can_read_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine"
    file.write_text("hunter2\n")
    file.chmod(0o644)
    words = ["--cluster", "a", "--role", "reader", "--password-file", str(file)]
    assert main(["acl", "redis", *words]) == 2
    seen = capsys.readouterr()
    assert "must be a regular file with mode 0600" in seen.err
    assert "hunter2" not in seen.err + seen.out


@pytest.mark.parametrize(
    "content", [b"hunter2", b"hunter2\r\nmore", b"hun\rter2\n", "hün\u2028ter\x0b2 \n".encode(), b"x" * 4096]
)
def test_a_password_is_the_same_for_the_server_and_for_a_node(
    acl: Any, tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / "mine"
    file.write_bytes(content)
    file.chmod(0o600)
    [line] = acl("--cluster", "prod", "--role", "reader", "--password-file", str(file), "--keep-default")
    node = RedisTierSettings(url="redis://tensorcache-reader@host", password_file=str(file)).address()
    assert f"#{hashlib.sha256(node.password.encode()).hexdigest()}" in line.split()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["pipe", "long"])
def test_a_password_file_that_will_not_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    file = tmp_path / "mine"
    if kind == "pipe":
        os.mkfifo(file, 0o600)
    else:
        file.write_text("x" * 4097)
        file.chmod(0o600)
    assert main(["acl", "redis", "--cluster", "a", "--role", "reader", "--password-file", str(file)]) == 2
    assert str(file) in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "policy"), [("blocks", "allkeys-lru"), ("membership", "noeviction")])
def test_a_real_server_starts_with_the_configuration(
    acl: Any, tmp_path: Path, kind: str, policy: str
) -> None:
    """Also with every line that is only shown, but for those that name files."""
    text = "\n".join(acl("--conf", kind))
    file = tmp_path / "redis.conf"
    file.write_text(text)
    with RedisServer(tmp_path, conf=file) as server:
        assert policy.encode() in server.command("CONFIG", "GET", "maxmemory-policy")
        assert server.command("PING") == b"+PONG"
    shown = [
        line[2:] for line in text.splitlines() if line.startswith("# ") and line[2:].split()[0].islower()
    ]
    settings = {line.split()[0] for line in shown if len(line.split()) == 2}
    assert {"tls-port", "tls-cert-file", "aclfile"} <= settings
    with RedisServer(tmp_path) as server:
        for name in settings:
            assert name.encode() in server.command("CONFIG", "GET", name), f"{name} is no setting"
