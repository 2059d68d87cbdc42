"""Rows of the ring: what a look-up costs, beside uhashring's, and how long a ring of a thousand nodes takes.

A look-up is the primary and one replica of a position, `owners(position, 2)`, with nothing subtracted for the
loop around it. Positions are drawn evenly and every one is new, so that the ring's tables are as cold as they
are when other work is done in between.

uhashring answers less, the node of a key, so against it one owner is asked. Both sides start from the same
str keys, call the same function of mmh3 on them (with MD5, its own choice, uhashring takes twice as long),
and have 16 nodes of 128 vnodes.
"""

import gc
from collections.abc import Iterator
from random import Random
from time import perf_counter
from types import ModuleType

from cachemgr.ring import NodeSpec, Ring, RingState, decode_ring, encode_ring, first_state
from scripts.bench.harness import Measurement, PeerMissingError, Reading, alternate, median_of, timed

_LOOKUPS = 20_000
_ROUNDS = 21
_SEED = 7
_TOP = (1 << 64) - 1


def measurements() -> list[Measurement]:
    """All measurements of the ring."""
    return [
        Measurement(("ring.lookup16_ns",), lambda: _lookup("ring.lookup16_ns", nodes=16)),
        Measurement(("ring.lookup1000_ns",), lambda: _lookup("ring.lookup1000_ns", nodes=1000)),
        Measurement(("ring.lookup16.vs_uhashring",), _against_uhashring),
        Measurement(("ring.build1000_s",), _build),
        Measurement(("ring.snapshot1000_ms",), _snapshot),
    ]


def _state(nodes: int) -> RingState:
    return first_state(
        [NodeSpec(f"cache-{number}", f"cache-{number}.example:7400") for number in range(nodes)], replicas=1
    )


def _lookup(row: str, *, nodes: int) -> Iterator[Reading]:
    ring = Ring(_state(nodes))
    random = Random(_SEED)
    owners = ring.owners

    def mean() -> float:
        positions = [random.getrandbits(64) for _ in range(_LOOKUPS)]
        started = perf_counter()
        for position in positions:
            owners(position, 2)
        return (perf_counter() - started) / _LOOKUPS

    seconds = median_of(mean, rounds=_ROUNDS)
    detail = f"{nodes} × 128 vnodes, two owners, median of {_ROUNDS} means of {_LOOKUPS} look-ups"
    yield Reading(row, 1e9 * seconds, detail)


def _against_uhashring() -> Iterator[Reading]:
    uhashring = _uhashring()
    import mmh3

    state, random, hashed = _state(16), Random(_SEED), mmh3.hash128
    owners = Ring(state).owners
    get_node = uhashring.HashRing([node.id for node in state.nodes], vnodes=128, hash_fn=hashed).get_node

    def keys() -> list[str]:
        return [f"{random.getrandbits(128):032x}" for _ in range(_LOOKUPS)]

    def ours() -> float:
        asked = keys()
        started = perf_counter()
        for key in asked:
            owners(hashed(key) & _TOP, 1)
        return (perf_counter() - started) / _LOOKUPS

    def theirs() -> float:
        asked = keys()
        started = perf_counter()
        for key in asked:
            get_node(key)
        return (perf_counter() - started) / _LOOKUPS

    paired = alternate(ours, theirs, rounds=_ROUNDS, warmups=2)
    mine, other = (1e9 * seconds for seconds in paired.medians)
    detail = f"{mine:.0f} ns against {other:.0f} ns, str keys, the same hash, 16 × 128, {_ROUNDS} pairs"
    yield Reading("ring.lookup16.vs_uhashring", paired.ratio, detail)


def _uhashring() -> ModuleType:
    try:
        import uhashring
    except ImportError:
        raise PeerMissingError("uhashring is not installed: run `make bench-peers`") from None
    module: ModuleType = uhashring
    return module


def _build() -> Iterator[Reading]:
    state = decode_ring(encode_ring(_state(1000)))

    def build() -> float:
        gc.collect()  # what others left behind
        return timed(lambda: Ring(state))

    seconds = median_of(build, rounds=5)
    yield Reading("ring.build1000_s", seconds, "1000 × 128 vnodes, from a decoded state, median of 5")


def _snapshot() -> Iterator[Reading]:
    state = _state(1000)
    seconds = median_of(lambda: timed(lambda: decode_ring(encode_ring(state))), rounds=_ROUNDS)
    detail = f"1000 nodes, {len(encode_ring(state)) >> 10} KiB, encoded and decoded, median of {_ROUNDS}"
    yield Reading("ring.snapshot1000_ms", 1e3 * seconds, detail)
