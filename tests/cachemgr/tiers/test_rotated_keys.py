"""A node seals with a tag secret that others do not have yet: they miss, remove nothing, read it later."""

import asyncio
from pathlib import Path

import pytest

import cachemgr.cache
from cachemgr import CacheSecrets, complete_secrets
from cachemgr.shard import Verdict
from tests.cachemgr.host import FORMAT, Host
from tests.cachemgr.node import Node, open_node
from tests.cachemgr.tiers.lower_tiers import LOWER_TIERS, OpenLowerTier
from tests.cachemgr.tiers.rig import addresses, chain_of, eventually, soon, whole_run

BLOCKS = 6


class LateNode:
    """`near` rotates its secrets; `far` has a copy of its own, which is late until `catch_up`."""

    def __init__(self, host: Host, folder: Path) -> None:
        self._here, self._there = folder / "here", folder / "there"
        complete_secrets(self._here)
        self._copy("naming.key", "tag-1.key")
        self.near = open_node(host, "near", secrets=CacheSecrets.load(self._here))
        self.far = open_node(host, "far", secrets=CacheSecrets.load(self._there))
        complete_secrets(self._here, rotate=True)
        self.near.cache._follow_secrets()

    def catch_up(self) -> None:
        self._copy("tag-2.key")
        self.far.cache._follow_secrets()

    def _copy(self, *names: str) -> None:
        self._there.mkdir(mode=0o700, exist_ok=True)
        for name in names:
            (self._there / name).touch(mode=0o600)
            (self._there / name).write_text((self._here / name).read_text())


@pytest.fixture
def late(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LateNode:
    monkeypatch.setattr(cachemgr.cache, "_REFRESH_INTERVAL_S", 3600.0)
    return LateNode(host, tmp_path)


@pytest.mark.parametrize("open_lower", LOWER_TIERS)
def test_below_all_nodes(open_lower: OpenLowerTier, late: LateNode, tmp_path: Path) -> None:
    async def run() -> None:
        names = chain_of(late.near, BLOCKS)
        blocks = addresses(names)
        async with open_lower(tmp_path) as tier:
            tier.put(late.near.store, blocks)
            await eventually(lambda: tier.counters()["put_blocks_total"] == BLOCKS)
            arrived: list[int] = []
            await tier.get(late.far.store, blocks, deadline=soon(), arrived=arrived.append)
            assert arrived == []
            assert tier.counters()["unreadable_blocks_total"] == 1, "the run ends there"
            late.catch_up()
            await tier.get(late.far.store, blocks, deadline=soon(), arrived=arrived.append)
            assert len(arrived) == BLOCKS == whole_run(late.far.store, names, FORMAT)
            counts = tier.counters()
            assert (counts["corrupt_blocks_total"], counts["removed_blocks_total"]) == (0, 0)

    asyncio.run(run())


def test_from_node_to_node(late: LateNode) -> None:
    names = chain_of(late.near, BLOCKS)

    def whole(node: Node) -> int:
        return whole_run(node.store, names, FORMAT)

    shard = late.near.hold_one(names[0])
    assert late.far.store.check(shard.header, shard.address) is Verdict.UNREADABLE
    late.near.store.let_go([shard])
    assert (whole(late.near), whole(late.far)) == (BLOCKS, 0)
    late.catch_up()
    assert late.near.give(late.far, names) == BLOCKS
    assert whole(late.far) == BLOCKS
