"""What is configured is opened, and nothing else is even imported."""

import subprocess
import sys
from pathlib import Path

import pytest

from cachemgr import (
    CacheSettings,
    ClusterSettings,
    LmdbTierSettings,
    NothingBeyond,
    RedisTierSettings,
    reach_beyond,
)

ALONE = """
import sys
from pathlib import Path
from cachemgr import CacheSettings, ClusterSettings, LmdbTierSettings, RedisTierSettings, reach_beyond
lmdb = LmdbTierSettings(path=sys.argv[1]) if sys.argv[1] else LmdbTierSettings()
redis = RedisTierSettings(url="redis://127.0.0.1:1") if sys.argv[2] else RedisTierSettings()
beyond = reach_beyond(CacheSettings(host_bytes=0), ClusterSettings(), redis=redis, lmdb=lmdb)
beyond.close()
print(*sorted({"redis", "hiredis", "lmdb", "grpc", "asyncio"} & set(sys.modules)))
"""


@pytest.mark.parametrize(
    ("lmdb", "redis", "imported"),
    [
        (False, False, []),
        (True, False, ["asyncio", "lmdb"]),
        (False, True, ["asyncio", "hiredis", "redis"]),
    ],
)
def test_only_what_is_configured_is_imported(
    tmp_path: Path, lmdb: bool, redis: bool, imported: list[str]
) -> None:
    command = [sys.executable, "-c", ALONE, str(tmp_path / "blocks") if lmdb else "", "yes" if redis else ""]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (answer.returncode, answer.stdout.split()) == (0, imported), answer.stderr


def test_with_nothing_configured_there_is_nothing_beyond() -> None:
    settings = CacheSettings(host_bytes=0)
    beyond = reach_beyond(settings, ClusterSettings(), redis=RedisTierSettings(), lmdb=LmdbTierSettings())
    assert isinstance(beyond, NothingBeyond)
    assert beyond.counters() == {}
