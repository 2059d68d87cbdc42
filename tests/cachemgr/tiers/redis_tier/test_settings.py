"""What section [redis] refuses, in words that name the field; and where the password may stand."""

from pathlib import Path

import msgspec
import pytest

from cachemgr.errors import SettingsError
from cachemgr.tiers.redis_tier import RedisTierSettings, open_redis_tier

URL = "redis://127.0.0.1:6379"


def secret_file(folder: Path, content: bytes = b"hunter2\n", *, mode: int = 0o600) -> str:
    file = folder / "password"
    file.write_bytes(content)
    file.chmod(mode)
    return str(file)


def test_nothing_is_configured_by_default() -> None:
    assert not RedisTierSettings().enabled
    assert RedisTierSettings(url=URL).enabled


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"url": "http://h"}, "url: must be redis://host:port"),
        ({"url": "redis://h:99999"}, "url: must have a port up to 65535"),
        ({"url": "redis://u:hunter2@h", "password_file": "p"}, "password_file: must be empty where url has"),
        ({"url": "redis://h/3", "cluster": True}, "url: must name database 0"),
        ({"password_file": "p"}, "url: must be set where password_file is"),
        ({"cluster": True}, "url: must be set where cluster is"),
    ],
)
def test_what_cannot_be(fields: dict[str, object], text: str) -> None:
    with pytest.raises(SettingsError) as refused:
        RedisTierSettings(**fields)  # type: ignore[arg-type]
    assert str(refused.value).startswith(text)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ttl_s", 0.0), ("admit_seen", 0), ("admit_seen", 16), ("call_s", 0.0), ("breaker_s", -1.0),
        ("connections", 0), ("queue_blocks", 0), ("window_bytes", 1), ("batch_bytes", 1), ("unknown", 1),
    ],
)  # fmt: skip
def test_limits(field: str, value: float) -> None:
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert({"url": URL, field: value}, RedisTierSettings)
    assert field in str(refused.value)


def test_the_password_comes_from_its_file(tmp_path: Path) -> None:
    url = "redis://tensorcache-writer@127.0.0.1:6379"
    address = RedisTierSettings(url=url, password_file=secret_file(tmp_path)).address()
    assert (address.username, address.password) == ("tensorcache-writer", "hunter2")
    assert "hunter2" not in f"{address} {address!r}"


@pytest.mark.parametrize(
    ("content", "mode", "text"),
    [
        (b"hunter2\n", 0o640, "must not be open to others (mode 0600), got '0640'"),
        (b"hunter2\n", 0o604, "must not be open to others (mode 0600), got '0604'"),
        (b"\nhunter2\n", 0o600, "must begin with 1 to 4096 bytes of text"),
        (b"", 0o600, "must begin with 1 to 4096 bytes of text"),
        (b"\xffhunter2", 0o600, "must begin with 1 to 4096 bytes of text"),
        (b"hunter2" * 1000, 0o600, "must begin with 1 to 4096 bytes of text"),
    ],
)
def test_a_password_file_that_will_not_do(tmp_path: Path, content: bytes, mode: int, text: str) -> None:
    settings = RedisTierSettings(url=URL, password_file=secret_file(tmp_path, content, mode=mode))
    with pytest.raises(SettingsError) as refused:
        open_redis_tier(settings, cluster="test")
    assert text in str(refused.value)
    assert str(refused.value).startswith("redis.password_file: ")
    assert "hunter2" not in str(refused.value)


def test_no_password_file_at_all(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(SettingsError, match=r"^redis\.password_file: "):
            RedisTierSettings(url=URL, password_file=str(path)).address()


def test_it_never_shows_a_password() -> None:
    assert "hunter2" not in repr(RedisTierSettings(url="redis://u:hunter2@h"))
    assert "hunter2" not in str(RedisTierSettings(url="redis://u:hunter2@h"))
