"""Secrets: generated once, read strictly, never shown."""

import errno
import grp
import hmac
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from cachemgr import CacheSecrets, SecretsError, complete_secrets, probe_secret
from tests.full_disk import REASON, room_for


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "secrets"


def test_generate_then_load(directory: Path) -> None:
    made, loaded = CacheSecrets.generate(directory), CacheSecrets.load(directory)
    assert (made.naming, made.tags) == (loaded.naming, loaded.tags)
    assert len({made.naming, *made.tags.values()}) == 2
    assert made.sealing_key_id == 1
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}
    assert directory.stat().st_mode & 0o777 == 0o700


def test_generate_never_overwrites(directory: Path) -> None:
    made = CacheSecrets.generate(directory)
    with pytest.raises(SecretsError, match=r"naming\.key: cannot be created"):
        CacheSecrets.generate(directory)
    assert CacheSecrets.load(directory).naming == made.naming


def test_the_highest_key_id_seals_and_old_ones_stay(directory: Path) -> None:
    CacheSecrets.generate(directory)
    rotated = directory / "tag-12.key"
    rotated.touch(mode=0o600)
    rotated.write_text("ab" * 32)
    loaded = CacheSecrets.load(directory)
    assert sorted(loaded.tags) == [1, 12]
    assert loaded.sealing_key_id == 12


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
@pytest.mark.parametrize("name", ["naming.key", "tag-1.key"])
def test_files_that_others_can_touch_are_refused(directory: Path, mode: int, name: str) -> None:
    CacheSecrets.generate(directory)
    (directory / name).chmod(mode)
    with pytest.raises(SecretsError, match=f"{name}: expected mode 0600, found {mode:04o}"):
        CacheSecrets.load(directory)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with the groups `ours`, that of every new file here, and `theirs`."""
    known = {"ours": os.getegid(), "theirs": os.getegid() + 1}

    def getgrnam(name: str) -> SimpleNamespace:
        return SimpleNamespace(gr_gid=known[name])

    monkeypatch.setattr(grp, "getgrnam", getgrnam)


@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize("mode", [0o640, 0o440, 0o600, 0o400])
@pytest.mark.parametrize("name", ["naming.key", "tag-1.key"])
def test_one_group_may_read_if_it_is_named(directory: Path, mode: int, name: str) -> None:
    made = CacheSecrets.generate(directory)
    (directory / name).chmod(mode)
    loaded = CacheSecrets.load(directory, group="ours")
    assert (loaded.naming, loaded.tags) == (made.naming, made.tags)
    if mode & 0o040:
        with pytest.raises(SecretsError, match=r"chmod 600 .* or name the one group .* secret_group"):
            CacheSecrets.load(directory)
        gid = os.getegid() + 1
        with pytest.raises(SecretsError, match=rf"{name}: .* \(gid {gid}\) .* run `chgrp {gid}"):
            CacheSecrets.load(directory, group="theirs")


@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize("mode", [0o660, 0o620, 0o644, 0o604, 0o641, 0o650, 0o602])
@pytest.mark.parametrize("name", ["naming.key", "tag-1.key"])
def test_a_group_may_never_write_and_others_never_anything(directory: Path, mode: int, name: str) -> None:
    CacheSecrets.generate(directory)
    (directory / name).chmod(mode)
    with pytest.raises(SecretsError, match=rf"{name}: expected mode 0640 .* found {mode:04o}: run"):
        CacheSecrets.load(directory, group="ours")


def test_an_unknown_group_is_named(directory: Path) -> None:
    CacheSecrets.generate(directory)
    for use in (CacheSecrets.load, complete_secrets):
        with pytest.raises(SecretsError, match="secret_group: this machine has no group 'no-such-group'"):
            use(directory, group="no-such-group")


@pytest.mark.usefixtures("groups")
def test_what_is_made_for_a_group_stays_with_it(directory: Path) -> None:
    complete_secrets(directory, group="ours")
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o640}
    assert directory.stat().st_mode & 0o777 == 0o750
    assert [path.name for path in complete_secrets(directory, rotate=True)] == ["tag-2.key"]
    assert (directory / "tag-2.key").stat().st_mode & 0o777 == 0o640
    assert CacheSecrets.load(directory, group="ours").sealing_key_id == 2
    with pytest.raises(SecretsError, match="expected mode 0600, found 0640"):
        CacheSecrets.load(directory)


def test_an_older_tag_secret_is_read_until_its_successor_is_older_than_the_grace(directory: Path) -> None:
    complete_secrets(directory)
    for second in (1000, 2000, 5000):
        if second > 1000:
            complete_secrets(directory, rotate=True)
        newest = max(directory.glob("tag-*"))
        os.utime(newest, (second, second))

    def key_ids(now: float) -> list[int]:
        return sorted(CacheSecrets.load(directory, grace_s=100.0, clock=lambda: now).tags)

    assert key_ids(2000) == key_ids(2099.9) == [1, 2, 3]
    assert key_ids(2100) == key_ids(5099.9) == [2, 3]
    assert key_ids(5100) == key_ids(1e12) == [3]


def test_a_key_id_that_no_header_can_hold_is_named(directory: Path) -> None:
    CacheSecrets.generate(directory)
    (directory / "tag-1.key").rename(directory / f"tag-{2**32}.key")
    with pytest.raises(SecretsError, match=rf"tag-{2**32}\.key: a key id must be at most {2**32 - 1}"):
        CacheSecrets.load(directory)


def test_a_directory_that_others_can_write_is_refused(directory: Path) -> None:
    CacheSecrets.generate(directory)
    directory.chmod(0o770)
    with pytest.raises(SecretsError, match="writable by no one else"):
        CacheSecrets.load(directory)


def test_symbolic_links_are_refused(directory: Path, tmp_path: Path) -> None:
    CacheSecrets.generate(directory)
    (directory / "naming.key").rename(tmp_path / "elsewhere")
    (directory / "naming.key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SecretsError, match=r"naming\.key: cannot be opened"):
        CacheSecrets.load(directory)


@pytest.mark.skipif(os.geteuid() != 0, reason="changing a file's owner takes root")
def test_files_of_another_owner_are_refused(directory: Path) -> None:
    CacheSecrets.generate(directory)
    os.chown(directory / "tag-1.key", 12345, 12345)
    with pytest.raises(SecretsError, match=r"tag-1\.key: must be a regular file of this user"):
        CacheSecrets.load(directory)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "ab" * 31,
        "ab" * 33,
        "zz" * 32,
        "é" * 32,
        "ab" * 400,
        "ab " * 32,
        "ab" * 32 + "\n\n",
        " " + "ab" * 32,
    ],
)
def test_malformed_secrets_are_refused_without_being_shown(directory: Path, content: str) -> None:
    CacheSecrets.generate(directory)
    (directory / "naming.key").write_text(content)
    with pytest.raises(SecretsError, match=r"naming\.key: expected 32 bytes in hex") as caught:
        CacheSecrets.load(directory)
    assert not content or content not in str(caught.value)


def test_a_full_disk_leaves_no_secret_and_no_other_file(directory: Path) -> None:
    for make in (CacheSecrets.generate, complete_secrets):
        with room_for(10), pytest.raises(SecretsError, match=rf"naming\.key: cannot be created \({REASON}\)"):
            make(directory)
        assert list(directory.iterdir()) == []
    assert [path.name for path in complete_secrets(directory)] == ["naming.key", "tag-1.key"]
    with room_for(10), pytest.raises(SecretsError, match=r"tag-2\.key: cannot be created"):
        complete_secrets(directory, rotate=True)
    assert CacheSecrets.load(directory).sealing_key_id == 1


@pytest.mark.parametrize("name", ["naming.key", "tag-1.key"])
@pytest.mark.parametrize("content", ["", "ab" * 7])
def test_an_incomplete_secret_is_named_and_nothing_is_made_beside_it(
    directory: Path, name: str, content: str
) -> None:
    directory.mkdir(mode=0o700)
    broken = directory / name
    broken.touch(mode=0o600)
    broken.write_text(content)
    for rotate in (False, True):
        with pytest.raises(SecretsError, match=rf"{name}: expected 32 bytes in hex, .* delete it and make"):
            complete_secrets(directory, rotate=rotate)
        assert [path.name for path in directory.iterdir()] == [name]


@pytest.mark.parametrize("links", [True, False])
def test_a_secret_that_appears_meanwhile_is_kept(
    directory: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    """Another process was quicker, on file systems with hard links and without."""
    link = os.link

    def late(source: Path, target: Path) -> None:
        if not target.exists():
            target.write_text("the other's")
        if not links:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        link(source, target)

    monkeypatch.setattr(os, "link", late)
    with pytest.raises(SecretsError, match="File exists"):
        complete_secrets(directory)
    assert [(path.name, path.read_text()) for path in directory.iterdir()] == [("naming.key", "the other's")]


def test_file_systems_without_hard_links_are_served(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    assert len(complete_secrets(directory)) == 2
    assert CacheSecrets.load(directory).sealing_key_id == 1
    assert {path.name for path in directory.iterdir()} == {"naming.key", "tag-1.key"}


def test_missing_parts_are_named(directory: Path) -> None:
    with pytest.raises(SecretsError, match="cannot be read"):
        CacheSecrets.load(directory)
    CacheSecrets.generate(directory)
    (directory / "tag-1.key").unlink()
    with pytest.raises(SecretsError, match="at least one tag"):
        CacheSecrets.load(directory)


def test_never_in_a_repr(directory: Path) -> None:
    made = CacheSecrets.generate(directory)
    shown = f"{made!r} {made}"
    for secret in (made.naming, *made.tags.values()):
        assert secret.hex() not in shown
        assert repr(secret) not in shown


def test_the_probe_secret_follows_the_naming_secret_alone() -> None:
    one = CacheSecrets(bytes(32), {1: bytes(32)})
    rotated = CacheSecrets(bytes(32), {1: bytes(32), 2: bytes(range(32))})
    other = CacheSecrets(bytes(range(32)), {1: bytes(32)})
    extracted = hmac.digest(b"tensorcache/probe/1", bytes(32), "sha256")
    assert probe_secret(one) == probe_secret(rotated) == hmac.digest(extracted, b"\x01", "sha256")
    assert probe_secret(other) != probe_secret(one)
