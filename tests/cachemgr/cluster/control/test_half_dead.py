"""A half-dead peer costs at most the deadline, yields misses, and opens its breaker while it is so."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachemgr.cluster.bulk.frames import PeerTrouble
from cachemgr.cluster.contract import Fetched
from cachemgr.contract import BlockHash
from cachemgr.ring import NodeSpec, RingState, add_node
from tests.cachemgr.cluster.control.half_dead import KINDS, Behave, FreezingProxy, half_dead
from tests.cachemgr.cluster.control.nodes import Node, cluster, run
from tests.cachemgr.cluster.control.stores import FORMAT, chain

BLOCKS = chain("x", 2)
NAMES = [block.hash for block in BLOCKS]
WHOLE = (np.array([0], np.uint64), np.array([2**64 - 1], np.uint64))
DEADLINE_S = 0.15
SLACK_S = 3.0
"""A busy machine; far less than the 10 s of `call_s`."""

Ask = Callable[[Node, Any, float], Awaitable[Any]]
CALLS: dict[str, tuple[Ask, Any]] = {
    "get": (lambda a, peer, by: peer.get(a.store, BLOCKS, deadline=by), Fetched((False, False))),
    "put": (lambda a, peer, by: peer.put(a.store, NAMES, deadline=by), [False, False]),
    "lookup": (lambda a, peer, by: peer.lookup(FORMAT, NAMES, deadline=by), [None, None]),
    "list_arcs": (lambda a, peer, by: peer.list_arcs(FORMAT, *WHOLE, after=b"", deadline=by), None),
    "moved": (lambda a, peer, by: peer.moved(FORMAT, NAMES, deadline=by), False),
    "exchange_ring": (lambda a, peer, by: peer.exchange_ring(deadline=by), None),
    "say_drain": (lambda a, peer, by: peer.say_drain(deadline=by), False),
}
CONTROL_CALLS = [name for name in CALLS if name not in ("get", "put")]


def joined(a: Node, port: int) -> Any:
    """Node h, said to be at `port`, as `a` sees it."""
    a.rings.install(add_node(a.rings.ring.state, NodeSpec("h", f"127.0.0.1:{port}")))
    return a.to("h")


@pytest.mark.parametrize("behave", KINDS, ids=lambda behave: behave.__name__)
def test_every_call_ends_by_its_deadline_with_a_miss(tmp_path: Path, behave: Behave) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "a", breaker_s=0.001) as (a,), half_dead(behave) as port:
            peer = joined(a, port)
            for name in CONTROL_CALLS:
                ask, miss = CALLS[name]
                began = a.time()
                assert await ask(a, peer, began + DEADLINE_S) == miss, name
                assert a.time() - began < DEADLINE_S + SLACK_S, name
                await asyncio.sleep(0.002)  # past breaker_s: every call is a probe
            assert sum(peer.troubles.values()) == len(CONTROL_CALLS)
            assert peer.down_since is not None
            assert not peer.usable

    run(test)


@pytest.mark.parametrize("name", ["get", "put"])
@pytest.mark.parametrize("behave", KINDS, ids=lambda behave: behave.__name__)
def test_a_door_that_does_not_open_is_a_miss(tmp_path: Path, behave: Behave, name: str) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "a", call_s=DEADLINE_S) as (a,), half_dead(behave) as port:
            ask, miss = CALLS[name]
            began = a.time()
            peer = joined(a, port)
            assert await ask(a, peer, a.within()) == miss
            assert a.time() - began < DEADLINE_S + SLACK_S
            assert sum(peer.troubles.values()) == 1

    run(test)


def test_once_the_breaker_is_open_nothing_waits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "a", breaker_s=60.0) as (a,), half_dead(KINDS[0]) as port:
            peer = joined(a, port)
            for _ in range(3):
                assert peer.usable
                await peer.lookup(FORMAT, NAMES, deadline=a.within(a.settings.lookup_s))
            assert not peer.usable
            began = a.time()
            for ask, miss in CALLS.values():
                assert await ask(a, peer, a.within()) == miss
            assert a.time() - began < DEADLINE_S
            assert peer.troubles == {"deadline": 3, "not_asked": len(CALLS)}

    caplog.set_level(logging.INFO, "cachemgr.breaker")
    run(test)
    assert [r.getMessage() for r in caplog.records if "breaker" in r.name] == [
        "peer h is down (deadline): not asked for 60 s"
    ]


def test_one_refused_connection_opens_the_breaker(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "ab") as (a, b):
            await b.stop()
            assert await a.to(b).lookup(FORMAT, NAMES, deadline=a.within()) == [None, None]
            assert a.to(b).troubles == {"refused": 1}
            assert not a.to(b).usable

    run(test)


def test_a_call_without_a_fair_chance_does_not_count_against_the_peer(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "a", lookup_s=5.0) as (a,), half_dead(KINDS[0]) as port:
            peer = joined(a, port)
            for _ in range(5):
                assert await peer.lookup(FORMAT, NAMES, deadline=a.within(0.02)) == [None, None]
            assert peer.troubles == {"deadline": 5}
            assert peer.usable

    run(test)


def test_trouble_of_the_bulk_channel_opens_the_breaker_unless_it_is_clean(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "ab") as (a, b):
            peer, bulk = a.to(b), a.bulks[b.id]
            bulk.trouble = PeerTrouble("busy", "too many requests")
            for _ in range(5):
                await peer.get(a.store, BLOCKS, deadline=a.within())
            assert peer.usable
            bulk.trouble = PeerTrouble("corrupt", "wrong tag")
            bulk.trouble.arrived = (True, False)
            for _ in range(3):
                assert peer.usable
                assert await peer.get(a.store, BLOCKS, deadline=a.within()) == Fetched((True, False))
            assert not peer.usable
            assert peer.troubles == {"bulk_busy": 5, "bulk_corrupt": 3}

    run(test)


def test_a_peer_that_comes_back_on_its_address_is_asked_again(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "ab", breaker_s=0.05) as (a, b):
            b.store.blocks.update({block.hash: block for block in BLOCKS})
            a.peers.start()
            for _ in range(3):
                assert await a.to(b).lookup(FORMAT, NAMES, deadline=a.within()) == BLOCKS
                await b.stop()
                assert await a.to(b).lookup(FORMAT, NAMES, deadline=a.within()) == [None, None]
                assert a.to(b).down_since is not None
                await b.start()
                async with asyncio.timeout(20):
                    while not a.to(b).usable:  # the probe that finds it again is nobody's call
                        await asyncio.sleep(0.005)
                assert a.to(b).down_since is None

    run(test)


def test_a_half_dead_node_that_recovers_is_asked_again(tmp_path: Path) -> None:
    """First something silent stands at its address, then the node itself."""

    async def test() -> None:
        async with cluster(tmp_path, "ab", breaker_s=0.05, call_s=0.3) as (a, b):
            await b.stop()
            b.store.blocks.update({block.hash: block for block in BLOCKS})
            async with half_dead(KINDS[1], b.port):
                for _ in range(3):
                    await a.to(b).lookup(FORMAT, NAMES, deadline=a.within(0.1))
                assert a.to(b).down_since is not None
                a.peers.start()
                await asyncio.sleep(0.2)
                assert not a.to(b).usable
            await b.start()
            async with asyncio.timeout(20):
                while not a.to(b).usable:
                    await asyncio.sleep(0.005)
            assert await a.to(b).lookup(FORMAT, NAMES, deadline=a.within()) == BLOCKS

    run(test)


def test_a_connection_that_went_dead_is_replaced(tmp_path: Path) -> None:
    """Nobody ever says so: what is sent on it is never answered, while a new one would be."""

    async def test() -> None:
        async with cluster(tmp_path, "ab", breaker_s=0.05, call_s=0.5) as (a, b):
            b.store.blocks.update({block.hash: block for block in BLOCKS})
            proxy = FreezingProxy(b.port)
            async with half_dead(proxy) as port:
                state = a.rings.ring.state
                nodes = (state.nodes[0], NodeSpec("b", f"127.0.0.1:{port}"))
                a.rings.install(RingState(2, nodes, {}, 1))
                assert await a.to(b).lookup(FORMAT, NAMES, deadline=a.within()) == BLOCKS
                proxy.freeze()
                for _ in range(3):
                    assert await a.to(b).lookup(FORMAT, NAMES, deadline=a.within(0.1)) == [None, None]
                assert not a.to(b).usable
                a.peers.start()
                async with asyncio.timeout(5):
                    while not a.to(b).usable:
                        await asyncio.sleep(0.005)
                assert await a.to(b).lookup(FORMAT, NAMES, deadline=a.within()) == BLOCKS
                await a.peers.close()

    run(test)


def test_names_that_nobody_has_are_no_trouble(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "ab") as (a, b):
            assert await a.to(b).lookup(FORMAT, [BlockHash(b"n" * 16)], deadline=a.within()) == [None]
            assert not a.to(b).troubles

    run(test)
