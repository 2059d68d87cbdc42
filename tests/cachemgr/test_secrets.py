"""Secrets: generated once, read strictly, never shown."""

import os
from pathlib import Path

import pytest

from cachemgr import CacheSecrets, SecretsError


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


@pytest.mark.parametrize("content", ["", "ab" * 31, "ab" * 33, "zz" * 32, "é" * 32, "ab" * 400])
def test_malformed_secrets_are_refused_without_being_shown(directory: Path, content: str) -> None:
    CacheSecrets.generate(directory)
    (directory / "naming.key").write_text(content)
    with pytest.raises(SecretsError, match=r"naming\.key: expected 32 bytes in hex") as caught:
        CacheSecrets.load(directory)
    assert not content or content not in str(caught.value)


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
