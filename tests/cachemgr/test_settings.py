"""Settings: every field refused by name, and the default bound."""

import math
import os

import msgspec
import pytest

from cachemgr import CacheSettings, SettingsError
from cachemgr.settings import default_bound

ODD_NAMES = [
    "",
    "Upper",
    "a_b",
    "a/b",
    "..\n",
    "é",
    "e\u0301",
    "\u0430bc",
    "a" * 64,
    "a b",
    "node\u200b",
    "１",
]


@pytest.mark.parametrize("field", ["cluster", "node"])
@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names_are_refused_by_name(field: str, name: str) -> None:
    with pytest.raises(SettingsError, match=f"^{field}: must be 1 to 63 characters") as caught:
        CacheSettings(**{field: name})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "value"),
    [("host_bytes", -1), ("arena_bytes", -1), ("ttl_s", 0.0), ("ttl_s", -1.0), ("ttl_s", math.nan)],
)
def test_limits(field: str, value: float) -> None:
    with pytest.raises(SettingsError, match=f"^{field}: must be .*, got {value}"):
        CacheSettings(**{field: value})


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="hostbytes"):
        msgspec.convert({"hostbytes": 1}, CacheSettings)


def test_the_default_bound_counts_our_own_arenas_as_free() -> None:
    space = os.statvfs("/dev/shm")
    free = space.f_bavail * space.f_frsize
    plain = default_bound("/dev/shm", held=0)
    assert 0 <= plain <= min(8 << 30, free // 2 + (1 << 20))
    assert plain <= default_bound("/dev/shm", held=1 << 40) <= 8 << 30


@pytest.mark.parametrize(
    ("chosen", "share"),
    [
        ({}, 50),
        ({"host_bytes": 100}, 100),
        ({"arena_bytes": 30}, 30),
        ({"host_bytes": 100, "arena_bytes": 300}, 100),
    ],
)
def test_the_share_of_one_process(chosen: dict[str, int], share: int) -> None:
    assert CacheSettings(**chosen).share(100) == share  # type: ignore[arg-type]
