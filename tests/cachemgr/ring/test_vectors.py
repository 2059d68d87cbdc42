"""The ring against a file of vectors, which another implementation made (reference.py)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachemgr.contract import BlockHash
from cachemgr.ring import Ring, decode_ring, encode_ring, extra_owners, move_vnode, position_of
from cachemgr.ring.points import vnode_points
from tests.cachemgr.ring import reference
from tests.cachemgr.ring.rings import share

FILE = Path(__file__).parent / "vectors" / "ring.json"


@pytest.fixture(scope="module")
def vectors() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


@pytest.fixture(scope="module")
def rings(vectors: dict[str, Any]) -> list[Ring]:
    return [Ring(decode_ring(epoch["encoded"].encode())) for epoch in vectors["epochs"]]


def test_file_is_what_the_reference_makes() -> None:
    assert FILE.read_text() == reference.text(reference.vectors())


def test_encoding_and_version(vectors: dict[str, Any], rings: list[Ring]) -> None:
    for number, (epoch, ring) in enumerate(zip(vectors["epochs"], rings, strict=True), start=1):
        assert encode_ring(ring.state).decode() == epoch["encoded"]
        assert ring.version == ring.state.version == (number, bytes.fromhex(epoch["digest"]))


def test_second_epoch_is_the_first_with_a_vnode_moved(rings: list[Ring]) -> None:
    assert move_vnode(rings[0].state, "b-2#17", "c-1") == rings[1].state


def test_points(vectors: dict[str, Any], rings: list[Ring]) -> None:
    for node in rings[-1].state.nodes:
        wanted = [int(point, 16) for point in vectors["points"][node.id]]
        assert vnode_points(node.id, node.vnodes).tolist() == wanted


def test_owners_of_a_thousand_positions(vectors: dict[str, Any], rings: list[Ring]) -> None:
    names = vectors["nodes"]
    assert len(vectors["owners"]) == 1000
    for position, *epochs in vectors["owners"]:
        for ring, row in zip(rings, epochs, strict=True):
            wanted = tuple(names[int(number)] for number in row)
            for n in range(5):
                assert ring.owners(int(position, 16), n) == wanted[:n]
            assert ring.vnode_at(int(position, 16))[2] == wanted[0]


def test_owned_of_a_thousand_positions(vectors: dict[str, Any], rings: list[Ring]) -> None:
    names = vectors["nodes"]
    positions = np.array([int(row[0], 16) for row in vectors["owners"]], np.uint64)
    for epoch, ring in enumerate(rings):
        for index, name in enumerate(names):
            wanted = [str(index) in row[1 + epoch][:2] for row in vectors["owners"]]
            assert ring.owned(positions, name, 2).tolist() == wanted


def test_extra_owners(vectors: dict[str, Any], rings: list[Ring]) -> None:
    for segment, *wanted in vectors["extra_owners"]:
        assert list(extra_owners(rings[-1], BlockHash(bytes.fromhex(segment)), 3)) == wanted


def test_vector_rings_are_even(rings: list[Ring]) -> None:
    """No node has more than 1.25 times what its weight would give it."""
    for ring in rings:
        per_weight = [share(ring, node.id) / node.weight for node in ring.state.nodes if not node.draining]
        assert max(per_weight) / (sum(per_weight) / len(per_weight)) <= 1.25


def test_position_is_the_first_eight_bytes_little_endian() -> None:
    assert position_of(BlockHash(bytes(range(1, 17)))) == 0x0807060504030201
