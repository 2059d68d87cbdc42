"""Who is asked what he has, and what becomes of his answer."""

import logging

import pytest

from cachemgr.tiers.fetching import TieredFetch
from tests.cachemgr.tiers.doubles import StoreDouble, TierDouble, names
from tests.cachemgr.tiers.simulated_time import clock, simulate


def test_who_was_asked_and_has_none_is_said(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        tiers = (TierDouble("redis", ()), TierDouble("lmdb", ()))
        fetching = TieredFetch(None, tiers, clock=clock, came=lambda store, blocks, tier: None)
        await fetching.fetch(StoreDouble(), names(8), deadline=clock() + 1, block_s=0.01)

    with caplog.at_level(logging.DEBUG, logger="cachemgr.tiers.fetching"):
        simulate(work)
    (line,) = [record.getMessage() for record in caplog.records if "tiers.fetching" in record.name]
    assert "redis has none" in line
    assert "lmdb has none" in line
