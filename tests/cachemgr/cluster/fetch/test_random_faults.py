"""Many fetches at once from peers that turn bad and good again at random."""

import asyncio
import random
import time
from collections.abc import Sequence

import pytest

from cachemgr import BlockHash
from cachemgr.ring import set_replicas
from tests.cachemgr import host
from tests.cachemgr.cluster.fetch.nodes import Cluster, Lag, PeerDouble, cluster

SLACK_S = 0.04
FETCHES = 120


def shake(peer: PeerDouble, dice: random.Random) -> None:
    """One peer gets another character."""
    peer.silent = peer.deaf = peer.raises = False
    peer.trickle_s, peer.delay_s, peer.usable, peer.down_since = None, 0.0, True, None
    match dice.randrange(9):
        case 0:
            peer.silent = True
        case 1:
            peer.deaf = True
        case 2:
            peer.raises = True
        case 3:
            peer.trickle_s = 0.002
        case 4:
            peer.delay_s = dice.random() * 0.1
        case 5:
            peer.usable, peer.down_since = False, time.monotonic()
    peer.load = dice.choice((0.0, 0.01, 0.5))


def prompts(c: Cluster, dice: random.Random) -> list[list[BlockHash]]:
    """Some are everywhere they should be, some have gaps, some nobody knows."""
    found = []
    for _ in range(6):
        hashes = c.chain(dice.randrange(1, 90))
        gaps = [index for index in range(len(hashes)) if dice.random() < dice.choice((0.0, 0.0, 0.05))]
        if dice.random() < 0.8:
            c.place_all(hashes, but=gaps)
        found.append(hashes)
    return found


@pytest.mark.parametrize("seed", range(6))
def test_fetches_end_in_time_leave_nothing_and_bring_right_bytes(seed: int) -> None:
    dice = random.Random(seed)
    with cluster(nodes=5, replicas=1, room=dice.choice((80, 600)), seed=seed) as c:
        known = prompts(c, dice)
        late: list[float] = []

        async def ask(hashes: Sequence[BlockHash]) -> None:
            within = dice.choice((0.0, 0.02, 0.2, 1.0))
            began = time.monotonic()
            try:
                await c.fetcher.fetch(c.me.store, hashes, deadline=began + within)
            finally:
                late.append(time.monotonic() - began - within)

        async def go() -> None:
            async with Lag() as lag:
                tasks = []
                for _ in range(FETCHES):
                    shake(dice.choice(list(c.peers.values())), dice)
                    hashes = dice.choice(known)
                    tasks.append(asyncio.create_task(ask(hashes[: dice.randrange(1, len(hashes) + 1)])))
                    if dice.random() < 0.3:
                        dice.choice(tasks).cancel()
                    if dice.random() < 0.05:
                        state = c.rings.ring.state
                        c.rings.install(set_replicas(state, (state.replicas + 1) % 3))
                    await asyncio.sleep(dice.random() * 0.01)
                ended = await asyncio.gather(*tasks, return_exceptions=True)
                assert {type(one) for one in ended} <= {type(None), asyncio.CancelledError}
            assert max(late) < SLACK_S + lag.worst_s
            for peer in c.peers.values():
                peer.deaf = False
            await asyncio.sleep(0.05)
            await c.fetcher.close()
            await c.repair.close()
            assert c.fetcher._flights == {}
            assert not c.fetcher._parts
            assert not c.fetcher._gets._going
            assert sum(peer.under_way for peer in c.peers.values()) == 0

        asyncio.run(go())
        assert c.fetcher.counters()["cluster_failed_parts_total"] == 0
        for hashes in known:
            host.read(c.me.cache, hashes)  # checks every byte
        c.me.cache.check_integrity()
