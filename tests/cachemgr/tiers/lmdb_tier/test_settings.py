"""Section [lmdb]: what is refused, and with which words."""

import msgspec
import pytest

from cachemgr import SettingsError
from cachemgr.tiers.lmdb_tier import LmdbTierSettings


def test_without_a_path_there_is_no_tier() -> None:
    assert not LmdbTierSettings().enabled
    assert LmdbTierSettings(path="/disk/blocks").enabled


@pytest.mark.parametrize(
    ("given", "named", "limit"),
    [
        ({"max_bytes": 1 << 20}, "max_bytes", "4194304"),
        ({"batch_writes": 0}, "batch_writes", "1"),
        ({"batch_s": 0}, "batch_s", "0"),
        ({"queue_blocks": 0}, "queue_blocks", "1"),
        ({"sync": "never"}, "sync", "never"),
        ({"admit_seen": 0}, "admit_seen", "1"),
        ({"paths": "x"}, "paths", "unknown"),
    ],
)
def test_what_is_out_of_its_limits_is_named(given: dict[str, object], named: str, limit: str) -> None:
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert(given, LmdbTierSettings)
    assert named in str(refused.value)
    assert limit in str(refused.value)


def test_a_path_that_is_none_is_named() -> None:
    with pytest.raises(SettingsError, match=r"path: .*zero bytes, got 'a\\x00b'"):
        LmdbTierSettings(path="a\0b")
