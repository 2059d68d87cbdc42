"""The parts that need no server: keys, what was offered lately, who refuses, what a slot map says."""

import pytest

from cachemgr.contract import BlockHash
from cachemgr.redis_address import RedisAddress
from cachemgr.redis_client import Kind, RedisTrouble, key_slot
from cachemgr.shard import BlockAddress
from cachemgr.tiers.redis_tier.counts import RedisCounts
from cachemgr.tiers.redis_tier.keys import BlockKeys, segment_tag
from cachemgr.tiers.redis_tier.offered import MOST_NAMES, OfferedLately
from cachemgr.tiers.redis_tier.places import _ranges
from cachemgr.tiers.redis_tier.refusing import FIRST_PAUSE_S, LONGEST_PAUSE_S, Refusing
from cachemgr.tiers.redis_tier.server import Manners, Server
from tests.cachemgr.host import Clock


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


def test_a_key() -> None:
    block = BlockAddress(name(2), name(1), name(0x10), 3)
    key = BlockKeys("prod", bytes(16)).key(block)
    assert key == (
        b"prod:kv:{00000000000000000000000000000010}:"
        b"00000000000000000000000000000000:00000000000000000000000000000002"
    )
    assert key_slot(key) == key_slot(segment_tag(block.segment)), "a segment is one server's"
    assert BlockKeys("prod", bytes(15) + b"\1").key(block) != key
    assert BlockKeys("test", bytes(16)).key(block) != key


def test_what_was_offered_is_remembered_for_a_while() -> None:
    clock = Clock()
    offered = OfferedLately(100.0, clock=clock)
    offered.add(name(1))
    clock.now += 49
    assert name(1) in offered
    clock.now += 2
    assert name(1) in offered
    offered.add(name(2))
    clock.now += 50
    assert name(1) not in offered, "never longer than it was told to"
    assert name(2) in offered
    clock.now += 1000
    assert name(2) not in offered


def test_what_is_not_there_is_offered_again() -> None:
    clock = Clock()
    offered = OfferedLately(100.0, clock=clock)
    offered.add(name(1))
    clock.now += 60
    offered.add(name(2))
    for number in (1, 2):
        offered.forget(name(number))
        assert name(number) not in offered


def test_what_was_offered_is_bounded() -> None:
    offered = OfferedLately(100.0, clock=Clock())
    for number in range(3 * MOST_NAMES):
        offered.add(name(number))
    held = sum(name(number) in offered for number in range(3 * MOST_NAMES))
    assert MOST_NAMES <= held <= 2 * MOST_NAMES


def test_who_refuses_is_tried_again_after_growing_pauses(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    refusing, server = Refusing(clock), a_server(clock)
    trouble = RedisTrouble("Redis at h:1 is full", kind=Kind.FULL)
    pause_s = FIRST_PAUSE_S
    for _ in range(10):
        assert not refusing.now(server)
        refusing.refused(server, trouble)
        refusing.refused(server, trouble)  # another block of the same batch
        clock.now += 0.99 * pause_s
        assert refusing.now(server)
        clock.now += 0.02 * pause_s
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    refusing.taken(server)
    refusing.refused(server, trouble)
    clock.now += 1.01 * FIRST_PAUSE_S
    assert not refusing.now(server)
    assert len(caplog.records) == 2, "one line each time that it begins"


def a_server(clock: Clock) -> Server:
    manners = Manners(call_s=1.0, breaker_s=1.0, connections=1, ttl_ms=1, probe=b"x")
    address = RedisAddress("h", 1)
    return Server(address, manners, counts=RedisCounts(), clock=clock, worry=bool, lost=bool)


def test_the_ranges_of_a_map() -> None:
    asked = RedisAddress("seed", 7000)
    answer = [
        [5461, 10922, [b"10.0.0.2", 7001, b"id"], [b"10.0.0.4", 7003, b"id"]],
        [0, 5460, [b"", 7000, b"id", []]],
    ]
    assert _ranges(answer, asked) == [(0, "seed", 7000), (5461, "10.0.0.2", 7001)]
    for strange in (
        None,
        b"x",
        1,
        [1],
        [[0, 1]],
        [[0, 1, [b"h"]]],
        [[0, 1, [b"h", b"x"]]],
        [[99999, 1, [b"h", 1]]],
    ):
        assert _ranges(strange, asked) == []
