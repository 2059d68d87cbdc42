"""The same seed brings the same faults; every kind comes; no card names a node that is not there."""

from itertools import islice

import pytest

from tests.cluster_faults.schedule import RING_CHANGES, Kind, draw


def test_a_seed_is_a_schedule() -> None:
    first, again = (list(islice(draw(7, nodes=3), 50)) for _ in range(2))
    assert first == again
    assert first != list(islice(draw(8, nodes=3), 50))


@pytest.mark.parametrize("nodes", [2, 3, 5])
def test_every_deck_has_every_kind_for_nodes_that_are_there(nodes: int) -> None:
    faults = list(islice(draw(1, nodes=nodes), 20 * len(Kind)))
    for start in range(0, len(faults), len(Kind)):
        assert {fault.kind for fault in faults[start : start + len(Kind)]} == set(Kind)
    assert {fault.node for fault in faults} == set(range(1, nodes + 1))
    assert all(fault.node != fault.other for fault in faults)
    replicas = {fault.number for fault in faults if fault.kind is Kind.REPLICAS}
    assert max(replicas) <= 3
    assert 0 in replicas


def test_ring_changes_kill_either_side_at_many_moments() -> None:
    faults = [fault for fault in islice(draw(3, nodes=3), 300) if fault.kind in RING_CHANGES]
    kills = [fault for fault in faults if fault.kill_after is not None]
    assert 0 < len(kills) < len(faults)
    assert {fault.killed == fault.node for fault in kills} == {True, False}
    assert len({fault.kill_after for fault in kills}) == len(kills)
    assert "SIGKILL of node" in str(kills[0])
    assert all(fault.kill_after is None for fault in islice(draw(3, nodes=3), 300) if fault.kind is Kind.KILL)
