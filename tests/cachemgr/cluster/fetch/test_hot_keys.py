"""When a segment is hot, how many extra owners it gets, when that is said, and when it is over."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from cachemgr import BlockHash
from cachemgr.cluster.fetch.hot_keys import HotHints, HotKeys
from cachemgr.cluster.settings import ClusterSettings
from cachemgr.ring import NodeId, NodeSpec, Ring, add_node, extra_owners, first_state, position_of
from tests.cachemgr.cluster.fetch.nodes import RingsDouble
from tests.cachemgr.host import Clock

SETTINGS = ClusterSettings(hot_reads_per_s=100.0, hot_window_s=5.0)


class Serving:
    """A node of eight that serves; it is the primary of `hot` and of `others`."""

    def __init__(self, *, replicas: int = 0) -> None:
        self.clock = Clock()
        nodes = [NodeSpec(f"n{at}", "127.0.0.1:7000") for at in range(8)]
        self.rings = RingsDouble("n0", first_state(nodes, replicas=replicas))
        self.hot, *self.others = [self.segment() for _ in range(21)]
        self.pushed: list[tuple[BlockHash, tuple[NodeId, ...]]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.takes = 99
        self._tasks: list[asyncio.Task[None]] = []
        self.keys = HotKeys(
            self.rings, self.spread, spawn=self.spawn, settings=SETTINGS, clock=self.clock
        )

    def segment(self, *, ours: bool = True) -> BlockHash:
        while True:
            found = BlockHash(os.urandom(16))
            if (self.rings.ring.owners(position_of(found), 1) == ("n0",)) == ours:
                return found

    def spawn(self, work: Awaitable[None]) -> None:
        assert isinstance(work, Coroutine)
        self._tasks.append(asyncio.create_task(work))

    async def spread(self, segment: BlockHash, nodes: tuple[NodeId, ...]) -> int:
        self.pushed.append((segment, nodes))
        await self.gate.wait()
        return min(self.takes, len(nodes))

    async def settle(self) -> None:
        while any(not task.done() for task in self._tasks) and self.gate.is_set():
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def serve(self, rate: float, seconds: float, *, quiet: float = 5.0) -> None:
        """The storm's reads of all owners per second, spread as announced; `quiet` of each other segment."""
        step = 0.05
        owed = 0.0
        for turn in range(round(seconds / step)):
            self.clock.now += step
            owed += rate * step / (1 + self.rings.ring.replicas + self.keys.extra(self.hot))
            for _ in range(int(owed)):
                self.keys.observe(self.hot)
            owed -= int(owed)
            for at, other in enumerate(self.others):
                if turn % max(1, round(1 / quiet / step)) == at % max(1, round(1 / quiet / step)):
                    self.keys.observe(other)
            await self.settle()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


@pytest.mark.parametrize(("rate", "k"), [(80, 0), (150, 2), (330, 4), (650, 7), (9000, 7)])
def test_k_follows_the_rate(rate: float, k: int) -> None:
    async def test() -> None:
        node = Serving()
        await node.serve(rate, 12)
        assert node.keys.extra(node.hot) == k
        for segment in node.others:
            assert node.keys.extra(segment) == 0

    run(test)


def test_a_storm_is_covered_within_its_first_second() -> None:
    async def test() -> None:
        node = Serving()
        await node.serve(5000, 1.0)
        assert node.keys.extra(node.hot) == 7

    run(test)


def test_a_burst_of_few_reads_is_no_storm() -> None:
    async def test() -> None:
        node = Serving()
        for _ in range(45):
            node.keys.observe(node.hot)  # 45 in no time, of 100 in a second
        await node.serve(0, 12)
        assert node.pushed == []

    run(test)


def test_k_stays_while_the_rate_does() -> None:
    async def test() -> None:
        node = Serving()
        await node.serve(330, 12)
        said = set()
        for turn in range(20):
            await node.serve(330 * (1.1 if turn % 2 else 0.95), 2)
            said.add(node.keys.extra(node.hot))
        assert said == {4}
        assert len(node.pushed) <= 4

    run(test)


def test_k_goes_down_step_by_step_and_ends() -> None:
    async def test() -> None:
        node = Serving()
        await node.serve(650, 12)
        assert node.keys.extra(node.hot) == 7
        await node.serve(200, 5)
        assert node.keys.extra(node.hot) == 7, "one calm window is not enough"
        await node.serve(200, 15)
        assert node.keys.extra(node.hot) == 3
        await node.serve(20, 20)
        assert node.keys.extra(node.hot) == 0
        assert node.keys.hot() == {}

    run(test)


def test_it_is_over_when_nothing_is_read_any_more() -> None:
    async def test() -> None:
        node = Serving()
        await node.serve(650, 12)
        node.clock.now += 60
        assert node.keys.extra(node.hot) == 0

    run(test)


def test_k_is_said_when_extra_owners_acknowledged() -> None:
    async def test() -> None:
        node = Serving()
        node.gate.clear()
        await node.serve(330, 8)
        assert node.keys.extra(node.hot) == 0
        assert len(node.pushed) == 1, "one push at a time"
        node.gate.set()
        await node.settle()
        assert node.keys.extra(node.hot) == 4
        ring = node.rings.ring
        told = [node for _, nodes in node.pushed for node in nodes]
        assert tuple(told) == extra_owners(ring, node.hot, 4), "each is given it once, in this order"

    run(test)


def test_only_those_that_took_it_are_counted_and_the_rest_is_asked_again() -> None:
    async def test() -> None:
        node = Serving()
        node.takes = 1
        await node.serve(600, 4)
        assert node.keys.extra(node.hot) == 1
        assert len(node.pushed) == 1, "who did not take it is left alone until the window ends"
        node.takes = 99
        await node.serve(600, 8)
        assert node.keys.extra(node.hot) == 6

    run(test)


def test_a_segment_like_all_others_is_not_hot() -> None:
    async def test() -> None:
        node = Serving()
        for _ in range(240):
            node.clock.now += 0.05
            for segment in (node.hot, *node.others):
                for _ in range(10):  # 200 reads a second each, twice the threshold
                    node.keys.observe(segment)
            await node.settle()
        assert node.pushed == []

    run(test)


def test_the_only_segment_of_a_node_can_be_hot() -> None:
    async def test() -> None:
        node = Serving()
        node.others = []
        await node.serve(330, 12)
        assert node.keys.extra(node.hot) == 4

    run(test)


def test_an_extra_owner_makes_nothing_hot() -> None:
    async def test() -> None:
        node = Serving()
        node.hot = node.segment(ours=False)
        await node.serve(9000, 12)
        assert node.pushed == []

    run(test)


def test_a_new_ring_begins_anew() -> None:
    async def test() -> None:
        node = Serving()
        await node.serve(330, 12)
        assert node.keys.extra(node.hot) == 4
        before = node.rings.ring
        node.rings.install(add_node(before.state, NodeSpec("n8", "127.0.0.1:7000")))
        assert node.keys.extra(node.hot) == 0
        if "n0" in node.rings.ring.owners(position_of(node.hot), 1):
            await node.serve(330, 12)
            assert node.keys.extra(node.hot) == 4

    run(test)


def test_replicas_share_before_anyone_is_extra() -> None:
    async def test() -> None:
        node = Serving(replicas=1)
        await node.serve(190, 12)  # 95 here
        assert node.keys.extra(node.hot) == 0
        await node.serve(450, 12)
        assert node.keys.extra(node.hot) == 5

    run(test)


def test_hot_segments_are_bounded() -> None:
    async def test() -> None:
        node = Serving()
        segments = [node.segment() for _ in range(80)]
        many = [BlockHash(os.urandom(16)) for _ in range(200)]
        for _ in range(110):
            node.clock.now += 0.05
            for segment in segments:
                for _ in range(8):
                    node.keys.observe(segment)
            for segment in many:
                node.keys.observe(segment)
            await node.settle()
        assert len(node.keys.hot()) == 64
        assert len(node.keys.top()) == 64
        assert {segment for segment, _ in node.keys.top()[:64]} <= set(segments)

    run(test)


def ring() -> Ring:
    return Ring(first_state([NodeSpec(f"n{at}", "127.0.0.1:7000") for at in range(8)], replicas=0))


def test_hints_last_two_windows() -> None:
    clock = Clock()
    hints = HotHints(settings=SETTINGS, clock=clock)
    segment = BlockHash(os.urandom(16))
    hints.note({segment: 3})
    clock.now += 9.9
    assert hints.extra(ring(), segment) == extra_owners(ring(), segment, 3)
    clock.now += 0.1
    assert hints.extra(ring(), segment) == ()


def test_hints_are_bounded_and_the_newest_stay() -> None:
    hints = HotHints(settings=SETTINGS, clock=Clock(), limit=10)
    segments = [BlockHash(os.urandom(16)) for _ in range(30)]
    for segment in segments:
        hints.note({segment: 2})
    assert [len(hints.extra(ring(), segment)) for segment in segments] == [0] * 20 + [2] * 10


def test_a_hint_of_none_takes_the_hint_back() -> None:
    hints = HotHints(settings=SETTINGS, clock=Clock())
    segment = BlockHash(os.urandom(16))
    hints.note({segment: 2})
    hints.note({segment: 0})
    assert hints.extra(ring(), segment) == ()
