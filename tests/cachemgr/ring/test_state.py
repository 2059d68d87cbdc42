"""What a ring may look like, its one encoding, and what is refused however it is written."""

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachemgr.ring import (
    NodeSpec,
    RingConflict,
    RingError,
    RingState,
    Version,
    decode_ring,
    encode_ring,
    first_state,
)
from cachemgr.ring.state import MAX_NBYTES, MAX_NODES, MAX_OVERRIDES
from tests.cachemgr.ring.rings import spec, states

GOOD: dict[str, Any] = {
    "epoch": 3,
    "nodes": [
        {"address": "a.example:7400", "domain": "", "draining": False, "id": "a", "weight": 1.0},
        {"address": "[::1]:7401", "domain": "rack", "draining": True, "id": "b.2-x", "weight": 2.5},
    ],
    "overrides": {"a#127": "b.2-x"},
    "replicas": 2,
}


def canonical(tree: Any) -> bytes:
    return json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()


def changed(*path: Any, value: Any) -> bytes:
    tree = json.loads(json.dumps(GOOD))
    at = tree
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return canonical(tree)


def without(*path: Any) -> bytes:
    tree = json.loads(json.dumps(GOOD))
    at = tree
    for key in path[:-1]:
        at = at[key]
    del at[path[-1]]
    return canonical(tree)


def test_good_one_is_taken() -> None:
    state = decode_ring(canonical(GOOD))
    assert encode_ring(state) == canonical(GOOD)
    assert decode_ring(memoryview(canonical(GOOD))) == state
    assert state.node("b.2-x") == NodeSpec("b.2-x", "[::1]:7401", "rack", 2.5, True)
    assert state.node("c") is None


@settings(max_examples=100)
@given(states())
def test_round_trip(state: RingState) -> None:
    again = decode_ring(encode_ring(state))
    assert again == state
    assert again.version == state.version
    assert len(state.version.digest) == 16


@pytest.mark.parametrize(
    ("field", "data"),
    [
        ("epoch", changed("epoch", value=0)),
        ("epoch", changed("epoch", value=1 << 63)),
        ("epoch", changed("epoch", value=1 << 70)),
        ("ring", changed("epoch", value="3")),
        ("ring", changed("epoch", value=3.0)),
        ("ring", changed("epoch", value=True)),
        ("replicas", changed("replicas", value=4)),
        ("replicas", changed("replicas", value=-1)),
        ("nodes", changed("nodes", value=[])),
        ("nodes", changed("nodes", value=[GOOD["nodes"][0]] * 2)),
        ("nodes", changed("nodes", value=GOOD["nodes"][::-1])),
        ("nodes", changed("nodes", 0, "draining", value=True)),
        ("ring", changed("nodes", value={})),
        ("ring", changed("nodes", 0, value="a")),
        ("ring", changed("nodes", 0, value=None)),
        ("id", changed("nodes", 0, "id", value="")),
        ("id", changed("nodes", 0, "id", value="A")),
        ("id", changed("nodes", 0, "id", value="a#1")),
        ("id", changed("nodes", 0, "id", value="a\n")),
        ("id", changed("nodes", 0, "id", value="é")),
        ("id", changed("nodes", 0, "id", value="a" * 64)),
        ("address", changed("nodes", 0, "address", value="")),
        ("address", changed("nodes", 0, "address", value="host")),
        ("address", changed("nodes", 0, "address", value="host:0")),
        ("address", changed("nodes", 0, "address", value="host:65536")),
        ("address", changed("nodes", 0, "address", value="host:7400/x")),
        ("address", changed("nodes", 0, "address", value="unix:/tmp/socket:1")),
        ("address", changed("nodes", 0, "address", value=f"{'h' * 254}:1")),
        ("domain", changed("nodes", 0, "domain", value="Rack")),
        ("domain", changed("nodes", 0, "domain", value="r" * 64)),
        ("weight", changed("nodes", 0, "weight", value=0.0)),
        ("weight", changed("nodes", 0, "weight", value=-1.0)),
        ("weight", changed("nodes", 0, "weight", value=1001.0)),
        ("ring", changed("nodes", 0, "weight", value=math.nan)),
        ("ring", changed("nodes", 0, "weight", value=math.inf)),
        ("ring", changed("nodes", 0, "weight", value="1.0")),
        ("ring", changed("nodes", 0, "weight", value=1)),  # canonical is 1.0
        ("ring", changed("nodes", 0, "draining", value=0)),
        ("ring", changed("nodes", 0, "extra", value=1)),
        ("ring", without("nodes", 0, "domain")),  # canonical leaves nothing out
        ("ring", without("nodes", 0, "id")),
        ("ring", without("epoch")),
        ("ring", changed("extra", value=1)),
        ("vnode", changed("overrides", value={"a": "b.2-x"})),
        ("vnode", changed("overrides", value={"a#01": "b.2-x"})),
        ("vnode", changed("overrides", value={"a#-1": "b.2-x"})),
        ("vnode", changed("overrides", value={"a#1\n": "b.2-x"})),
        ("vnode", changed("overrides", value={"a#٣": "b.2-x"})),
        ("overrides", changed("overrides", value={"a#128": "b.2-x"})),
        ("overrides", changed("overrides", value={"b.2-x#320": "a"})),
        ("overrides", changed("overrides", value={"c#1": "a"})),
        ("overrides.a#1", changed("overrides", value={"a#1": "c"})),
        ("overrides.a#1", changed("overrides", value={"a#1": "a"})),
        ("ring", changed("overrides", value={"a#1": 1})),
        ("ring", changed("overrides", value=[])),
    ],
)
def test_out_of_limits(field: str, data: bytes) -> None:
    with pytest.raises(RingError) as refused:
        decode_ring(data)
    assert refused.value.field == field
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b"\xff\xfe",
        canonical(GOOD) + b"\n",
        b" " + canonical(GOOD),
        canonical(GOOD)[:-1],
        canonical(GOOD).replace(b'"epoch":3', b'"epoch":3,"epoch":3'),
        canonical(GOOD).replace(b'"epoch":3', b'"epoch":NaN'),
        canonical(GOOD).replace(b'"epoch":3', b'"epoch": 3'),
        canonical(GOOD).replace(b'"id":"a"', b'"id":"\\u0061"'),
        canonical(GOOD).replace(b'"id":"a"', b'"id":"\xff"'),
        canonical(GOOD).replace(b'"weight":2.5', b'"weight":2.50'),
        canonical(GOOD).replace(b'"weight":2.5', b'"weight":25e-1'),
        json.dumps(GOOD).encode(),
        canonical(GOOD).replace(b'"epoch":3', b'"epoch":' + b"9" * 1_000_000),
        canonical(GOOD).replace(b'"weight":1.0', b'"weight":' + b"9" * 1_000_000),
        canonical(GOOD).replace(b'"weight":1.0', b'"weight":1e400'),
        b"[" * 1_000_000,
        b'{"nodes":' + b"[" * 1_000_000,
        b'{"overrides":' + b'{"a#1":' * 300_000,
        b'{"surprise":' + b"[" * 500_000 + b"]" * 500_000 + b"}",
    ],
    ids=range(23),
)
def test_anything_but_the_canonical_form(data: bytes) -> None:
    with pytest.raises(RingError):
        decode_ring(data)


@settings(max_examples=200)
@given(st.binary(max_size=300))
def test_noise(data: bytes) -> None:
    with pytest.raises(RingError):
        decode_ring(data)


@settings(max_examples=200)
@given(st.integers(0, len(canonical(GOOD)) - 1), st.binary(max_size=4), st.integers(0, 4))
def test_a_damaged_one_is_refused_or_another_canonical_one(at: int, put: bytes, cut: int) -> None:
    data = canonical(GOOD)[:at] + put + canonical(GOOD)[at + cut :]
    try:
        state = decode_ring(data)
    except RingError:
        return
    assert encode_ring(state) == data


def test_too_long_is_not_parsed() -> None:
    with pytest.raises(RingError, match="bytes"):
        decode_ring(b" " * (MAX_NBYTES + 1))


def test_too_many() -> None:
    node = GOOD["nodes"][0]
    nodes = [{**node, "id": f"{number:05}"} for number in range(MAX_NODES + 1)]
    with pytest.raises(RingError, match="nodes: must be at most 4096, got 4097"):
        decode_ring(canonical({**GOOD, "nodes": nodes, "overrides": {}}))
    heavy = [{**node, "id": f"{number:05}", "weight": 1000.0} for number in range(9)]
    with pytest.raises(RingError, match="vnodes together, got 1152000"):
        decode_ring(canonical({**GOOD, "nodes": heavy, "overrides": {}}))
    pair = [{**node, "weight": 65.0}, GOOD["nodes"][1]]
    moved = {f"a#{number}": "b.2-x" for number in range(MAX_OVERRIDES + 1)}
    with pytest.raises(RingError, match="overrides: must be at most 8192, got 8193"):
        decode_ring(canonical({**GOOD, "nodes": pair, "overrides": moved}))


def test_longest_within_limits_can_be_decoded() -> None:
    """So that no ring that exists is too long to be told."""
    long = "x" * 58
    nodes = tuple(
        NodeSpec(f"{long}{number:05}", f"{'h' * 253}:65535", "d" * 63, 1.0009765625, False)
        for number in range(MAX_NODES)
    )
    overrides = {f"{nodes[number // 128].id}#{number % 128}": nodes[-1].id for number in range(MAX_OVERRIDES)}
    state = RingState((1 << 63) - 1, nodes, overrides, 3)
    assert decode_ring(encode_ring(state)) == state


@pytest.mark.parametrize("weight", [math.nan, math.inf, -math.inf, 0.0, 1e-9])
def test_limits_hold_for_structs_made_here_too(weight: float) -> None:
    with pytest.raises(RingError, match=r"weight: must be 0\.001 to 1000"):
        NodeSpec("a", "a:1", weight=weight)
    with pytest.raises(RingError, match="weight"):
        msgspec.structs.replace(spec("a"), weight=weight)


def test_first_state() -> None:
    state = first_state([spec("b"), spec("a")], replicas=3)
    assert (state.epoch, [node.id for node in state.nodes], state.overrides) == (1, ["a", "b"], {})
    with pytest.raises(RingError, match="nodes: must be sorted by id and name every node once"):
        first_state([spec("a"), spec("a")], replicas=0)
    with pytest.raises(RingError, match="at least one"):
        first_state([], replicas=0)


def test_vnodes_follow_weight() -> None:
    counts = {0.001: 1, 0.01: 1, 0.5: 64, 1.0: 128, 0.51953125: 67, 1.51953125: 195, 3.0: 384, 1000.0: 128000}
    assert {weight: spec("a", weight=weight).vnodes for weight in counts} == counts
    assert spec("a", draining=True).vnodes == 0


def test_versions_are_ordered_by_epoch_then_digest() -> None:
    low, high = Version(3, b"\xff" * 16), Version(4, bytes(16))
    assert low < high
    assert Version(3, bytes(16)) < low
    assert str(RingConflict(high)) == "the ring was changed meanwhile: it is epoch 4 (00000000) now"
    assert RingConflict(high).version == high


def test_every_difference_is_another_digest() -> None:
    one = decode_ring(canonical(GOOD))
    others = [
        msgspec.structs.replace(one, replicas=1),
        msgspec.structs.replace(one, overrides={"a#126": "b.2-x"}),
        msgspec.structs.replace(one, nodes=(one.nodes[0], spec("b.2-x", domain="rack", weight=2.5))),
    ]
    assert len({state.version.digest for state in [one, *others]}) == 4
