"""What the tiers show: the same names for the same things, and a line for each on the metrics page."""

import threading
import time
from pathlib import Path

import pytest

from cachemgr.metric_texts import METRIC_TEXTS
from cachemgr.tiers.door import DoorCounts
from cachemgr.tiers.lmdb_tier import LmdbTierSettings, open_lmdb_tier
from cachemgr.tiers.lmdb_tier.counts import LmdbCounts
from cachemgr.tiers.redis_tier import RedisTierSettings, open_redis_tier
from cachemgr.tiers.sources import Sources
from cachemgr.tiers.tier_counts import TierCounts
from tests.cachemgr.host import Host

_OF_EVERY_TIER = {f"tier_{name}" for name in (*TierCounts().totals(), "queue_blocks", "usable")}


@pytest.fixture
def figures(tmp_path: Path) -> dict[str, dict[str, float]]:
    """Of both tiers, not started."""
    redis = open_redis_tier(RedisTierSettings(url="redis://127.0.0.1:1"), cluster="test")
    lmdb = open_lmdb_tier(LmdbTierSettings(path=str(tmp_path / "lmdb")))
    return Sources(None, [redis, lmdb], clock=time.monotonic).counters()


@pytest.mark.parametrize("tier", ["redis", "lmdb"])
def test_tiers_call_the_same_things_the_same(figures: dict[str, dict[str, float]], tier: str) -> None:
    assert set(figures[tier]) >= _OF_EVERY_TIER


def test_every_figure_of_cache_and_tiers_is_explained(
    figures: dict[str, dict[str, float]], host: Host
) -> None:
    of_tiers = {name for counted in figures.values() for name in counted}
    shown = of_tiers | set(DoorCounts().totals()) | set(host.open().counters())
    assert not shown - set(METRIC_TEXTS), "without a line"
    not_counted_here = {"cache_errors_total", "beyond_fetches_under_way"}
    assert set(METRIC_TEXTS) - shown == not_counted_here, "a line for nothing"


def test_threads_that_count_together_lose_nothing() -> None:
    counts = LmdbCounts()
    threads = [
        threading.Thread(target=lambda: [counts.add(put_known=1, put_dropped=2) for _ in range(5000)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    totals = counts.totals()
    assert (totals["put_known_total"], totals["put_dropped_total"]) == (20_000, 40_000)
    assert all(not name.startswith("_") for name in totals)
