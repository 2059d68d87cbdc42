"""What every lower tier promises: the right blocks or none, in order, in time, and a clean end."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from cachemgr import CacheSecrets
from cachemgr.tiers.contract import LowerTier
from tests.cachemgr.host import SECRETS, Host
from tests.cachemgr.node import open_node
from tests.cachemgr.tiers.lower_tiers import LOWER_TIERS, OpenLowerTier
from tests.cachemgr.tiers.rig import WIDE, Pair, addresses, chain_of, eventually, soon, whole_run

BLOCKS = 20
PAYLOAD = 256
"""Bytes of a block of the tests' usual format."""


@pytest.fixture(params=LOWER_TIERS)
def open_lower(request: pytest.FixtureRequest) -> OpenLowerTier:
    opened: OpenLowerTier = request.param
    return opened


Scene = Callable[[Callable[[LowerTier], Awaitable[None]]], None]


@pytest.fixture
def scene(open_lower: OpenLowerTier, tmp_path: Path) -> Scene:
    """Runs a coroutine function with a tier that was started, and is closed afterwards."""

    def run(act: Callable[[LowerTier], Awaitable[None]]) -> None:
        async def whole() -> None:
            async with open_lower(tmp_path) as tier:
                await act(tier)

        asyncio.run(whole())

    return run


def test_what_was_put_comes_back_whole_and_in_order(scene: Scene, host: Host) -> None:
    async def act(tier: LowerTier) -> None:
        pair = Pair(host)
        assert tier.usable
        await pair.keep(tier)
        assert await tier.known(pair.far.store, pair.blocks, deadline=soon()) == BLOCKS
        seen: list[int] = []
        await tier.get(
            pair.far.store, pair.blocks, deadline=soon(), arrived=lambda nbytes: seen.append(pair.whole())
        )
        assert len(seen) == BLOCKS
        assert all(whole > told for told, whole in enumerate(seen)), "each is there when it is said to be"
        assert tier.counters()["get_blocks_total"] == BLOCKS
        assert tier.counters()["put_blocks_total"] == BLOCKS

    scene(act)


def test_blocks_longer_than_a_piece(scene: Scene, host: Host) -> None:
    async def act(tier: LowerTier) -> None:
        pair = Pair(host, blocks=40, block_format=WIDE)
        await pair.keep(tier)
        assert await pair.fetch(tier) == 40
        assert pair.arrived == [WIDE.payload_nbytes] * 40

    scene(act)


def test_a_run_ends_at_the_first_block_that_is_not_there(scene: Scene, host: Host) -> None:
    async def act(tier: LowerTier) -> None:
        pair = Pair(host)
        await pair.keep(tier, pair.blocks[:5])
        await pair.keep(tier, pair.blocks[6:])
        assert await tier.known(pair.far.store, pair.blocks, deadline=soon()) == 5
        assert await pair.fetch(tier) == 5
        assert pair.far.store.missing(pair.names) == list(range(5, BLOCKS))
        assert await tier.known(pair.far.store, pair.blocks[6:], deadline=soon()) == BLOCKS - 6

    scene(act)


def test_nothing_is_known_of_what_was_never_put(scene: Scene, host: Host) -> None:
    async def act(tier: LowerTier) -> None:
        pair = Pair(host)
        assert await tier.known(pair.far.store, pair.blocks, deadline=soon()) == 0
        assert await tier.known(pair.far.store, [], deadline=soon()) == 0
        await tier.get(pair.far.store, [], deadline=soon(), arrived=pair.arrived.append)
        assert await pair.fetch(tier) == 0
        assert pair.arrived == []
        assert tier.usable

    scene(act)


def test_what_is_put_again_moves_no_bytes(scene: Scene, host: Host) -> None:
    async def act(tier: LowerTier) -> None:
        pair = Pair(host)
        await pair.keep(tier)
        written = tier.counters()["put_blocks_total"]
        for _ in range(3):
            await pair.keep(tier)
        assert tier.counters()["put_blocks_total"] == written == BLOCKS

    scene(act)


def test_what_is_gone_when_its_turn_comes_is_passed_by(scene: Scene, host: Host) -> None:
    async def act(tier: LowerTier) -> None:
        pair = Pair(host)
        tier.put(pair.near.store, pair.blocks)
        pair.near.store.drop(pair.names[3:])  # the loop has not had a turn since
        await eventually(lambda: tier.counters()["put_blocks_total"] == 3)
        await eventually(lambda: tier.counters()["queue_blocks"] == 0)
        assert await tier.known(pair.far.store, pair.blocks, deadline=soon()) == 3

    scene(act)


def test_what_the_store_has_already_is_passed_by(scene: Scene, host: Host) -> None:
    async def act(tier: LowerTier) -> None:
        pair = Pair(host)
        await pair.keep(tier)
        pair.near.give(pair.far, pair.names[4:9])
        assert await pair.fetch(tier) == BLOCKS
        assert len(pair.arrived) == BLOCKS - 5

    scene(act)


def test_a_store_without_room_is_no_trouble(scene: Scene, host: Host) -> None:
    async def act(tier: LowerTier) -> None:
        pair = Pair(host)
        await pair.keep(tier)
        small = open_node(host, "small", blocks=4)
        kept = chain_of(small, 4, seed=9)
        held = small.store.hold(kept)
        await tier.get(small.store, pair.blocks, deadline=soon(), arrived=pair.arrived.append)
        assert pair.arrived == []
        small.store.let_go([one for one in held if one is not None])
        assert await pair.fetch(tier) == BLOCKS

    scene(act)


def test_a_cancelled_get_leaves_nothing_behind(scene: Scene, host: Host) -> None:
    """At every stage: before anything came, and after each of the first blocks."""

    async def act(tier: LowerTier) -> None:
        pair = Pair(host, block_format=WIDE)
        other = chain_of(pair.near, 6, block_format=WIDE, seed=5)
        await pair.keep(tier)
        await pair.keep(tier, addresses(other))
        for after in range(6):
            pair.far.store.drop([*pair.names, *other])
            arrived: list[int] = []
            cancelled = asyncio.create_task(
                tier.get(pair.far.store, pair.blocks, deadline=soon(), arrived=arrived.append)
            )
            await eventually(lambda enough=after, got=arrived: len(got) >= enough)
            cancelled.cancel()
            await asyncio.gather(cancelled, return_exceptions=True)
            found = pair.whole()
            await tier.get(pair.far.store, addresses(other), deadline=soon(), arrived=arrived.append)
            assert whole_run(pair.far.store, other, WIDE) == 6
            assert pair.whole() == found, "nothing of the cancelled one came later"
            assert await pair.fetch(tier) == BLOCKS, "every slot that was reserved was given back"

    scene(act)


def test_a_deadline_that_has_passed_costs_nothing(scene: Scene, host: Host) -> None:
    async def act(tier: LowerTier) -> None:
        pair = Pair(host)
        await pair.keep(tier)
        for _ in range(5):
            past = time.monotonic() - 1.0
            await tier.known(pair.far.store, pair.blocks, deadline=past)
            await tier.get(pair.far.store, pair.blocks, deadline=past, arrived=pair.arrived.append)
        assert tier.usable, "whoever had no time says nothing about the tier"
        assert await pair.fetch(tier) == BLOCKS

    scene(act)


def test_many_at_once(scene: Scene, host: Host) -> None:
    async def act(tier: LowerTier) -> None:
        near = open_node(host, "near", blocks=200)
        far = open_node(host, "far", blocks=200)
        chains = [chain_of(near, 12, seed=seed) for seed in range(12)]
        for names in chains:
            tier.put(near.store, addresses(names))
        await eventually(lambda: tier.counters()["put_blocks_total"] == 12 * 12)

        async def bring(index: int) -> None:
            blocks = addresses(chains[index])
            assert await tier.known(far.store, blocks, deadline=soon()) == 12
            await tier.get(far.store, blocks, deadline=soon(), arrived=bool)

        await asyncio.gather(*(bring(index % 12) for index in range(24)))
        assert [whole_run(far.store, names) for names in chains] == [12] * 12

    scene(act)


def test_a_full_queue_drops_and_counts(open_lower: OpenLowerTier, host: Host, tmp_path: Path) -> None:
    async def act() -> None:
        pair = Pair(host)
        async with open_lower(tmp_path, queue_blocks=8) as tier:
            tier.put(pair.near.store, pair.blocks)
            assert tier.counters()["queue_blocks"] <= 8
            assert tier.counters()["put_dropped_total"] == BLOCKS - 8
            await eventually(lambda: tier.counters()["put_blocks_total"] == 8)
            assert await tier.known(pair.far.store, pair.blocks, deadline=soon()) == 8

    asyncio.run(act())


def test_blocks_of_another_secret_are_never_taken(scene: Scene, host: Host) -> None:
    """Under an unknown key id they are left for others; under a known one they are removed."""

    async def act(tier: LowerTier) -> None:
        pair = Pair(host)
        await pair.keep(tier)
        tags = {7: bytes(32)}
        stranger = open_node(host, "stranger", secrets=CacheSecrets(SECRETS.naming, tags))
        await tier.get(stranger.store, pair.blocks, deadline=soon(), arrived=pair.arrived.append)
        assert pair.arrived == []
        assert tier.counters()["unreadable_blocks_total"] >= 1
        assert await pair.fetch(tier) == BLOCKS, "they were left"
        forger = open_node(host, "forger", secrets=CacheSecrets(SECRETS.naming, {1: bytes(32)}))
        pair.arrived.clear()
        await tier.get(forger.store, pair.blocks, deadline=soon(), arrived=pair.arrived.append)
        assert pair.arrived == []
        assert tier.counters()["corrupt_blocks_total"] == 1, "the run ends there"
        deadline = soon()
        while await tier.known(pair.far.store, pair.blocks, deadline=soon()):
            assert time.monotonic() < deadline, "it was not removed"
            await asyncio.sleep(0.01)

    scene(act)


def test_formats_do_not_mix(scene: Scene, host: Host) -> None:
    async def act(tier: LowerTier) -> None:
        pair = Pair(host)
        await pair.keep(tier)
        wide = open_node(host, "wide", block_format=WIDE)
        assert await tier.known(wide.store, pair.blocks, deadline=soon()) == 0
        await tier.get(wide.store, pair.blocks, deadline=soon(), arrived=pair.arrived.append)
        assert pair.arrived == []
        assert tier.counters()["corrupt_blocks_total"] == 0

    scene(act)


def test_a_forgotten_store_is_not_used_any_more(scene: Scene, host: Host) -> None:
    async def act(tier: LowerTier) -> None:
        pair = Pair(host, blocks=40, block_format=WIDE)
        tier.put(pair.near.store, pair.blocks)
        await tier.forget(pair.near.store)
        pair.near.cache.close()
        other = chain_of(pair.far, 3, block_format=WIDE, seed=3)
        tier.put(pair.far.store, addresses(other))
        await eventually(lambda: tier.counters()["queue_blocks"] == 0)
        deadline = soon()
        while await tier.known(pair.far.store, addresses(other), deadline=soon()) < 3:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)

    scene(act)


def test_what_waits_is_written_before_its_store_goes(scene: Scene, host: Host) -> None:
    async def act(tier: LowerTier) -> None:
        pair = Pair(host)
        await pair.keep(tier, pair.blocks[:1])  # it is up
        tier.put(pair.near.store, pair.blocks)
        await tier.forget(pair.near.store)
        assert tier.counters()["put_blocks_total"] == BLOCKS
        assert tier.counters()["queue_blocks"] == 0

    scene(act)


def test_what_waits_is_written_before_it_closes(
    open_lower: OpenLowerTier, host: Host, tmp_path: Path
) -> None:
    async def act() -> None:
        pair = Pair(host)
        async with open_lower(tmp_path) as tier:
            await pair.keep(tier, pair.blocks[:1])  # it is up
            tier.put(pair.near.store, pair.blocks)
            await tier.close()
            counted = tier.counters()
            assert counted["put_blocks_total"] == BLOCKS
            assert counted["queue_blocks"] == 0

    asyncio.run(act())


def test_closing_leaves_nothing_and_asking_afterwards_finds_nothing(
    open_lower: OpenLowerTier, host: Host, tmp_path: Path
) -> None:
    async def act() -> None:
        pair = Pair(host)
        threads = set(threading.enumerate())
        async with open_lower(tmp_path) as tier:
            await pair.keep(tier)
            await tier.close()
            await tier.close()
            assert not tier.usable
            assert await tier.known(pair.far.store, pair.blocks, deadline=soon()) == 0
            assert await pair.fetch(tier) == 0
            tier.put(pair.near.store, pair.blocks)
            await tier.forget(pair.near.store)
            assert set(tier.counters())
            assert asyncio.all_tasks() == {asyncio.current_task()}
            assert set(threading.enumerate()) <= threads

    asyncio.run(act())
