"""A real Redis Cluster: segments on their servers, a slot that moves, a master that dies."""

import asyncio
from functools import partial
from pathlib import Path

import pytest

from cachemgr.tiers.contract import LowerTier
from tests.cachemgr.host import Host
from tests.cachemgr.tiers.redis_tier.redis_cluster import RedisCluster, running_cluster
from tests.cachemgr.tiers.redis_tier.rig import in_time, key_of, tier_at, until_usable
from tests.cachemgr.tiers.rig import Pair, addresses, chain_of, eventually, soon, whole_run

BLOCKS = 160
"""Ten segments: with this prompt, some on every server."""


async def kept(pair: Pair, tier: LowerTier) -> None:
    """Offer until all is there: while servers change, some of it is dropped."""
    while await tier.known(pair.near.store, pair.blocks, deadline=soon()) < BLOCKS:
        tier.put(pair.near.store, pair.blocks)
        await eventually(lambda: tier.counters()["queue_blocks"] == 0)


async def fetched(pair: Pair, tier: LowerTier) -> None:
    """Ask as one request after the other would, until all has come; each ends in time."""
    while pair.whole() < BLOCKS:
        rest = pair.blocks[pair.far.store.missing(pair.names)[0] :]
        get = partial(tier.get, pair.far.store, rest, deadline=soon(1.0), arrived=bool)
        await in_time(get, limit_s=1.0)
        await asyncio.sleep(0.02)


@pytest.mark.timeout(120)
def test_a_cluster(host: Host, tmp_path: Path) -> None:
    """One cluster for all of it, as it takes its time to start."""

    async def run(cluster: RedisCluster) -> None:
        pair = Pair(host, blocks=BLOCKS)
        async with tier_at(cluster.url, cluster=True, call_s=2.0) as tier:
            await until_usable(tier)
            await kept(pair, tier)
            assert all(cluster.keys()), "segments are spread"
            assert sum(cluster.keys()) == BLOCKS
            assert await pair.fetch(tier) == BLOCKS
            assert tier.counters()["troubles_total"] == 0
            await a_slot_moves(cluster, pair, tier)
            await a_master_dies(cluster, pair, tier)

    with running_cluster(tmp_path) as cluster:
        asyncio.run(run(cluster))


async def a_slot_moves(cluster: RedisCluster, pair: Pair, tier: LowerTier) -> None:
    """Who is asked for what is another's says so: a miss, a new map, and the next one is right."""
    slot = cluster.masters[0].command("CLUSTER", "KEYSLOT", key_of(pair, pair.blocks[0])).decode()[1:]
    source = next(one for one in cluster.masters if owns(one.command("CLUSTER", "NODES"), int(slot)))
    target = next(one for one in cluster.masters if one is not source)
    for block in pair.blocks[:16]:
        source.command("DEL", key_of(pair, block))
    new = target.command("CLUSTER", "MYID")
    for server in (target, source, *cluster.masters):
        server.command("CLUSTER", "SETSLOT", slot, "NODE", new)
    await kept(pair, tier)
    pair.far.store.drop(pair.names)
    await fetched(pair, tier)
    assert tier.counters()["breaker_opened_total"] == 0, "nobody was to blame"


async def a_master_dies(cluster: RedisCluster, pair: Pair, tier: LowerTier) -> None:
    """Its replica has what it had; meanwhile what the others have is brought."""
    await eventually(lambda: cluster.replica.command("DBSIZE") == cluster.masters[0].command("DBSIZE"))
    cluster.masters[0].kill()
    assert (
        await in_time(lambda: tier.known(pair.far.store, pair.blocks, deadline=soon(1.0)), limit_s=1.0)
        < BLOCKS
    )
    pair.far.store.drop(pair.names)
    await fetched(pair, tier)
    assert tier.counters()["breaker_opened_total"] >= 1
    await until_usable(tier)
    other = chain_of(pair.near, 64, seed=3)
    tier.put(pair.near.store, addresses(other))
    await eventually(lambda: tier.counters()["queue_blocks"] == 0)
    await tier.get(pair.far.store, addresses(other), deadline=soon(), arrived=bool)
    assert whole_run(pair.far.store, other) == 64


def owns(nodes: bytes, slot: int) -> bool:
    """Does the node that gave this CLUSTER NODES have the slot?"""
    [mine] = [line for line in nodes.splitlines() if b"myself" in line]
    for part in mine.split()[8:]:
        first, _, last = part.partition(b"-")
        if first.isdigit() and int(first) <= slot <= int(last or first):
            return True
    return False


def test_without_the_setting_a_cluster_is_misses(
    host: Host, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of what the named node has, blocks come; the rest is another's, and no breaker opens for it."""

    async def run(cluster: RedisCluster) -> None:
        pair = Pair(host, blocks=BLOCKS)
        async with tier_at(cluster.url, call_s=2.0) as tier:
            tier.put(pair.near.store, pair.blocks)
            await eventually(lambda: tier.counters()["put_refused_total"] > 0)
            assert await pair.fetch(tier) < BLOCKS
            assert tier.counters()["breaker_opened_total"] == 0

    with running_cluster(tmp_path) as cluster:
        asyncio.run(run(cluster))
    said = [record.getMessage() for record in caplog.records if "cluster = true" in record.getMessage()]
    assert len(said) == 1, "and it is said, once"
