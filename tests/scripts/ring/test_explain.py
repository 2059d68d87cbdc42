"""`tensorcache ring explain`: segment, position, vnode, owners, copies, and whom a reader asks now."""

import json
from collections.abc import Callable

import pytest

from cachemgr.ring import NodeId, Ring, move_vnode, position_of
from cachemgr.shard import BlockAddress
from tests.cachemgr.cluster.control.stores import chain
from tests.scripts.ring.conftest import Ask
from tests.scripts.ring.ring_cluster import RingCluster


def segment_of(cluster: RingCluster, owners: Callable[[tuple[str, ...]], bool]) -> list[BlockAddress]:
    """The second segment of a chain, with owners as wanted."""
    ring: Ring = cluster.nodes[0].rings.ring
    for number in range(1000):
        blocks = chain(f"explain {number}", 32)[16:]
        if owners(ring.owners(position_of(blocks[0].segment), 2)):
            return blocks
    raise AssertionError("no such segment")


def test_a_block_in_the_middle_of_a_segment(still_cluster: RingCluster, ask: Ask) -> None:
    blocks = segment_of(still_cluster, lambda owners: owners == ("node-b", "node-c"))
    still_cluster.give(1, *blocks)
    still_cluster.give(2, *blocks[:5])
    said = ask("explain", blocks[3].hash.hex(), *still_cluster.at)
    assert (said.code, said.err) == (0, "")
    ring: Ring = still_cluster.nodes[0].rings.ring
    position = position_of(blocks[0].segment)
    vnode, point, _ = ring.vnode_at(position)
    assert said.lines[:4] == [
        f"block     {blocks[3].hash.hex()}  (block 19 of its chain, 3 of its segment)",
        f"segment   {blocks[0].hash.hex()}",
        f"position  {position}",
        f"vnode     {vnode} at {point}, on node-b",
    ]
    table = said.table()
    assert [row[:3] for row in table[1:]] == [["node-b", "primary", "up"], ["node-c", "replica 1", "up"]]
    assert [row[4:] for row in table[1:]] == [["16", "yes"], ["5", "yes"]]
    assert "if hot    node-a: extra owners, in this order" in said.lines
    assert said.lines[-1].startswith("read now  node-a asks node-b or node-c, at random")


def test_a_block_that_only_a_surplus_copy_has(cluster: RingCluster, ask: Ask) -> None:
    blocks = segment_of(cluster, lambda owners: "node-a" not in owners)
    cluster.give(0, *blocks[:1])
    said = ask("explain", blocks[0].hash.hex(), *cluster.at)
    rows = said.table()[1:]
    assert rows[2][:2] == ["node-a", "copy (extra owner 1 if hot)"]
    assert [row[-2:] for row in rows] == [["0", "no"], ["0", "no"], ["1", "yes"]]
    assert said.lines[-1] == "read now  node-a reads its own copy"


def test_a_segment_by_its_first_digits(cluster: RingCluster, ask: Ask) -> None:
    blocks = segment_of(cluster, lambda owners: owners[0] == "node-b")
    cluster.give(1, *blocks)
    digits = blocks[0].hash.hex()[:16]
    whole = ask("explain", digits, *cluster.at)
    assert f"segment   {blocks[0].hash.hex()}" in whole.lines
    assert whole.lines[0] == f"block     {digits}  (block 16 of its chain, 0 of its segment)"
    twin = blocks[0].hash[:8] + bytes(8)
    cluster.give(2, BlockAddress(twin, bytes(16), twin, 0))  # type: ignore[arg-type]
    both = ask("explain", digits, *cluster.at)
    assert both.code == 2
    assert f"2 segments begin with {digits}: name one of " in both.err


def test_a_block_that_nobody_has(still_cluster: RingCluster, ask: Ask) -> None:
    said = ask("explain", "ff" * 16, *still_cluster.at)
    assert said.code == 0
    assert said.lines[0] == f"block     {'ff' * 16}  (no node has it; taken for the first of its segment)"
    assert ask("explain", "ff" * 8, *still_cluster.at).code == 0


def test_moved_vnodes_and_nodes_that_are_down(cluster: RingCluster, ask: Ask) -> None:
    blocks = segment_of(cluster, lambda owners: owners == ("node-b", "node-c"))
    ring: Ring = cluster.nodes[0].rings.ring
    vnode = ring.vnode_at(position_of(blocks[0].segment))[0]
    assert ask("move", vnode, "node-a", *cluster.at).code == 0
    assert cluster.versions() == {move_vnode(ring.state, vnode, "node-a").version}
    cluster.stop(1)
    said = ask("explain", blocks[0].hash.hex(), *cluster.at)
    assert any(line.endswith(f", on node-a, moved there from {NodeId('node-b')}") for line in said.lines)
    assert said.lines[-1] == f"warning  node-b: no node listens at {cluster.nodes[1].spec.address}"


def test_the_less_loaded_owner_is_asked(cluster: RingCluster, ask: Ask) -> None:
    blocks = segment_of(cluster, lambda owners: owners == ("node-b", "node-c"))

    async def burden() -> None:
        for _ in range(20):
            cluster.nodes[0].to(cluster.nodes[1])._calls.latency.note(2.0)

    cluster.do(burden)
    last = ask("explain", blocks[0].hash.hex(), *cluster.at).lines[-1]
    assert last.startswith("read now  node-a asks node-c: less loaded (")


def test_a_reader_whose_owners_are_all_down_computes(cluster: RingCluster, ask: Ask) -> None:
    blocks = segment_of(cluster, lambda owners: owners == ("node-b", "node-c"))

    async def open_breakers() -> None:
        for other in cluster.nodes[1:]:
            cluster.nodes[0].to(other)._calls.breaker.trouble("test", refused=True)

    cluster.do(open_breakers)
    said = ask("explain", blocks[0].hash.hex(), *cluster.at)
    assert said.lines[-1] == "read now  node-a computes it: no other owner can be asked (see their state)"


def test_explain_as_json(cluster: RingCluster, ask: Ask) -> None:
    blocks = segment_of(cluster, lambda owners: owners == ("node-b", "node-c"))
    cluster.give(1, *blocks)
    data = json.loads(ask("explain", blocks[2].hash.hex(), "--json", *cluster.at).out)
    assert (data["segment"], data["index"]) == (blocks[0].hash.hex(), 18)
    assert data["owners"] == ["node-b", "node-c"]
    assert [(one["id"], one["blocks"], one["has_block"]) for one in data["nodes"]] == [
        ("node-b", 16, True),
        ("node-c", 0, False),
    ]


@pytest.mark.parametrize("text", ["xyz", "ff" * 7, "ff" * 17, "f" * 31])
def test_what_is_no_hash_is_refused(ask: Ask, text: str) -> None:
    said = ask("explain", text, "--at", "127.0.0.1:1")
    assert said.code == 2
    assert said.err.startswith(f"tensorcache: {text!r} is no block hash: give its 32 hex digits")
