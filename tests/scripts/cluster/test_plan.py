"""What a plan gives each node, and which plans are refused."""

from pathlib import Path

import pytest

from scripts.cluster.plan import ClusterPlan
from scripts.errors import UsageError
from scripts.triton_runtime import TritonAddress


def plan(count: int = 3, **others: object) -> ClusterPlan:
    return ClusterPlan(  # type: ignore[arg-type]
        home=Path("/home"), count=count, release=Path("/r"), key=Path("/k"), **others
    )


def test_every_node_has_a_home_and_ports_of_its_own() -> None:
    nodes = plan(8).nodes
    assert [node.id for node in nodes] == [f"node-{number}" for number in range(1, 9)]
    assert len({node.home for node in nodes}) == 8
    ports = [
        port
        for node in nodes
        for port in (node.address.http_port, node.address.grpc_port, node.address.metrics_port)
    ]
    controls = [int(node.control.rpartition(":")[2]) for node in nodes]
    assert len(set(ports + controls)) == 32
    assert (nodes[0].address, nodes[0].control) == (TritonAddress(), "127.0.0.1:8005")
    assert (nodes[2].address.http_port, nodes[2].control_port) == (8020, 8025)


@pytest.mark.parametrize(
    ("count", "others", "told"),
    [
        (0, {}, "--nodes must be 1 to 8, got 0"),
        (9, {}, "--nodes must be 1 to 8, got 9"),
        (3, {"control_port": 65530}, "need ports up to 65550"),
        (2, {"control_port": 8010}, "two nodes would share one"),
        (2, {"control_port": 8000}, "two nodes would share one"),
    ],
)
def test_a_plan_that_cannot_be(count: int, others: dict[str, object], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        plan(count, **others)
