"""The admin key and the probe's credential: who may read them, and what is said when they are of no use."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from backend.access import probe_credential
from cachemgr import CacheSecrets, probe_secret
from scripts.backend_layout import write_node_config
from scripts.cli import main
from scripts.errors import RejectedError
from scripts.node_keys import admin_key, probe_key
from scripts.served_release import ServerView
from scripts.triton_runtime import TritonAddress
from tests.scripts.standin_server import StandInServer, standin_server

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def server() -> Iterator[StandInServer]:
    with standin_server() as made:
        yield made


@pytest.fixture
def home(tmp_path: Path) -> Path:
    key = tmp_path / "some.pub"
    key.touch()
    write_node_config(tmp_path / "home" / "tensorcache.toml", keys=(key,))
    return tmp_path / "home"


def credential_of(home: Path) -> str:
    return probe_credential(probe_secret(CacheSecrets.load(home / "secrets")))


def probe(server: StandInServer, *words: str) -> int:
    return main(["probe", "--model", "small", "--http-port", str(server.server_address[1]), *words])


def test_the_admin_key_has_256_bits_in_a_file_that_nobody_else_reads(tmp_path: Path) -> None:
    file = tmp_path / "admin.key"
    before = os.umask(0)
    try:
        key = admin_key(file)
    finally:
        os.umask(before)
    assert len(bytes.fromhex(key)) == 32
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert admin_key(file) == key
    assert admin_key(tmp_path / "other.key") != key


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o666, 0o601])
def test_an_admin_key_that_others_may_have_read_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "admin.key"
    key = admin_key(file)
    file.chmod(mode)
    with pytest.raises(RejectedError, match=rf"expected mode 0600, found {mode:04o}.*delete it") as raised:
        admin_key(file)
    assert key not in str(raised.value)


@pytest.mark.parametrize("text", ["", "\n", "sesame", "0" * 63, "0" * 65, "g" * 64, "0" * 64 + "\n\n"])
def test_an_admin_key_of_another_form_is_refused_and_not_shown(tmp_path: Path, text: str) -> None:
    file = tmp_path / "admin.key"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(RejectedError, match="expected 32 bytes in hex") as raised:
        admin_key(file)
    assert "sesame" not in str(raised.value)


def test_an_admin_key_is_no_link_and_no_pipe(tmp_path: Path) -> None:
    admin_key(tmp_path / "real.key")
    (tmp_path / "link.key").symlink_to(tmp_path / "real.key")
    (tmp_path / "dangling.key").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe.key", 0o600)
    for name, problem in {
        "link": "a symbolic link",
        "dangling": "a symbolic link",
        "pipe": "regular file",
    }.items():
        with pytest.raises(RejectedError, match=problem):
            admin_key(tmp_path / f"{name}.key")
    assert not (tmp_path / "nothing").exists()


def test_who_may_read_the_secrets_may_probe(home: Path) -> None:
    key = probe_key(home / "tensorcache.toml")
    assert key.credential == credential_of(home)
    assert str(key.credential) not in repr(key)
    assert "admits" not in key.missing


def test_without_secrets_there_is_no_credential_and_the_reason_is_kept(home: Path) -> None:
    (home / "secrets" / "naming.key").chmod(0o644)
    key = probe_key(home / "tensorcache.toml")
    assert key.credential is None
    assert "expected mode 0600" in key.missing
    assert "nothing.toml is not there" in probe_key(home / "nothing.toml").missing
    (home / "tensorcache.toml").write_text("[secrets")
    assert "expected TOML" in probe_key(home / "tensorcache.toml").missing


def test_a_probe_shows_the_credential_of_its_home(home: Path, server: StandInServer, capsys: Capture) -> None:
    server.admits = credential_of(home)
    assert probe(server, "--home", str(home)) == 0
    assert probe(server, "--config", str(home / "tensorcache.toml")) == 0
    assert probe(server, "--home", str(home / "nothing")) == 1
    said = capsys.readouterr()
    assert "access is controlled there, and this probe had no credential" in said.err
    server.admits = "another"
    assert probe(server, "--home", str(home)) == 1
    shown = capsys.readouterr()
    assert "these secrets do not admit a probe" in shown.err
    assert credential_of(home) not in said.out + said.err + shown.out + shown.err


def test_without_access_control_a_probe_needs_nothing(
    server: StandInServer, tmp_path: Path, capsys: Capture
) -> None:
    assert probe(server, "--home", str(tmp_path)) == 0
    assert "api_key" not in server.asked[-1]
    assert capsys.readouterr().err == ""


def test_who_asks_what_serves_is_told_why_there_is_no_answer(home: Path, server: StandInServer) -> None:
    server.release, server.admits = "0" * 16, credential_of(home)
    address = TritonAddress(http_port=int(server.server_address[1]))
    key = probe_key(home / "tensorcache.toml")
    assert ServerView(address, "small", key=key).ask().release == "0" * 16
    refused = ServerView(address, "small", key=probe_key(home / "nothing.toml")).ask()
    assert (refused.release, refused.reachable, refused.loaded) == ("", True, True)
    assert "access is controlled there" in refused.reason
