"""`tensorcache ring show` and `owners`, of real control services."""

import json
from pathlib import Path

import pytest

from cachemgr.ring import Ring, move_vnode
from scripts.ring.tables import columns
from tests.cachemgr.cluster.certificates import Authority
from tests.cachemgr.cluster.control.stores import chain
from tests.scripts.ring.conftest import Ask
from tests.scripts.ring.ring_cluster import RingCluster, ring_cluster

HASH = "000102030405060708090a0b0c0d0e0f"


def test_columns_are_aligned() -> None:
    rows = [("a", "1", "one"), ("bbbb", "200", "up, and more"), ("c", "30", "")]
    assert columns(("node", "n", "state"), rows, numbers=("n",)) == [
        "node    n  state",
        "a       1  one",
        "bbbb  200  up, and more",
        "c      30",
    ]


def test_show(cluster: RingCluster, ask: Ask) -> None:
    cluster.give(0, *chain("x", 3))
    said = ask("show", *cluster.at)
    assert (said.code, said.err) == (0, "")
    assert said.lines[0].startswith("ring 1 (")
    assert said.lines[0].endswith(" of cluster test: 3 nodes, 1 replicas")
    table = said.table()
    assert table[0] == ["node", "address", "domain", "weight", "vnodes", "share", "state", "blocks", "size"]
    address = cluster.nodes[0].spec.address
    assert table[1][:5] == ["node-a", address, "node-a", "1", "128"]
    assert table[1][6:] == ["up", "3", "3.0 MiB"]
    assert sum(float(row[5].rstrip("%")) for row in table[1:]) == pytest.approx(100, abs=0.2)
    assert len(said.lines) == 5  # no warning


def test_show_keeps_its_columns_whatever_is_in_them(cluster: RingCluster, ask: Ask) -> None:
    cluster.stop(2)
    lines = ask("show", *cluster.at).lines[1:5]
    for name in ("weight", "vnodes", "share"):
        end = lines[0].index(name) + len(name)
        assert all(line[end - 1] != " " and line[end] == " " for line in lines[1:])
    begin = lines[0].index("state")
    assert [line[begin:].split("  ")[0] for line in lines[1:]] == ["up", "up", "not reachable"]


def test_show_tells_what_is_wrong(cluster: RingCluster, ask: Ask) -> None:
    trouble = "Redis at 127.0.0.1:6379 is not there; living on ring 1, the last one known"
    cluster.nodes[0].trouble.append(trouble)
    cluster.nodes[1].pulled = False
    cluster.stop(2)
    said = ask("show", *cluster.at)
    assert said.code == 0
    assert [row[6] for row in said.table()[1:]] == ["up", "pulling", "not reachable"]
    address = cluster.nodes[2].spec.address
    assert said.lines[-2:] == [
        f"warning  node-a: {trouble}",
        f"warning  node-c: no node listens at {address}",
    ]


def test_show_sees_draining_nodes_open_breakers_and_older_rings(cluster: RingCluster, ask: Ask) -> None:
    a, b, c = cluster.nodes
    assert ask("drain", "node-c", *cluster.at).code == 0

    async def newer_at_b() -> None:
        b.rings.install(move_vnode(b.rings.ring.state, "node-a#1", "node-b"))
        a.to(b)._calls.breaker.trouble("test", refused=True)

    cluster.do(newer_at_b)
    said = ask("show", *cluster.at)
    assert [row[6] for row in said.table()[1:]] == ["up", "breaker open", "draining"]
    assert said.table()[3][4:6] == ["0", "0.0%"]
    assert any("node-b: has ring 3 (" in line and "not (yet) this one" in line for line in said.lines)
    assert c.rings.version.epoch == 2


def test_show_warns_of_a_crowded_domain(tmp_path: Path, ask: Ask) -> None:
    with ring_cluster(tmp_path, names="abcd", domains=("x", "x", "y", "z")) as cluster:
        said = ask("show", *cluster.at)
        assert said.lines[-1].startswith("warning  failure domain x holds 50% of the ring")
        assert [row[2] for row in said.table()[1:]] == ["x", "x", "y", "z"]


def test_show_as_json(cluster: RingCluster, ask: Ask) -> None:
    cluster.stop(1)
    data = json.loads(ask("show", "--json", *cluster.at).out)
    assert (data["epoch"], data["replicas"], data["asked"]) == (1, 1, "node-a")
    assert [node["reachable"] for node in data["nodes"]] == [True, False, True]
    assert sum(node["share"] for node in data["nodes"]) == pytest.approx(1.0)
    assert data["nodes"][1]["blocks"] is None


def test_owners(still_cluster: RingCluster, ask: Ask) -> None:
    said = ask("owners", HASH, "5", "0xff", *still_cluster.at)
    assert said.code == 0
    ring: Ring = still_cluster.nodes[0].rings.ring
    position = int.from_bytes(bytes.fromhex(HASH)[:8], "little")
    for line, at in zip(said.lines[2:], (position, 5, 255), strict=True):
        primary, replica = ring.owners(at, 2)
        assert line.split()[1:] == [str(at), ring.vnode_at(at)[0], primary, replica]
    data = json.loads(ask("owners", "5", "--json", *still_cluster.at).out)
    assert data["places"][0]["owners"] == list(ring.owners(5, 2))


@pytest.mark.parametrize("place", ["xyz", HASH[:-1], str(1 << 64), "-1", "0x", HASH + "00"])
def test_what_is_no_place_is_refused(ask: Ask, place: str) -> None:
    said = ask("owners", "--at", "127.0.0.1:1", "--", place)
    assert said.code == 2
    assert said.err.startswith(f"tensorcache: {place!r} is no hash and no position: give ")
    assert said.err.count("\n") == 1


def test_errors_say_what_to_do_next(cluster: RingCluster, ask: Ask) -> None:
    cluster.stop(1)
    address = cluster.nodes[1].spec.address
    gone = ask("show", *cluster.via(1))
    assert (gone.code, gone.out) == (1, "")
    assert gone.err == f"tensorcache: no node listens at {address}: start it, or name another one with --at\n"
    foreign = ask("show", "--at", cluster.nodes[0].spec.address, "--cluster", "other")
    assert foreign.code == 1
    assert foreign.err.endswith("is not of cluster 'other': name its cluster with --cluster\n")
    far = ask("show", "--at", "10.0.0.1:8005")
    assert (far.code, "name a tensorcache.toml that has tls_cert" in far.err) == (2, True)
    bad = ask("show", "--at", "nowhere")
    assert bad.code == 2
    assert "--at: must be host:port" in bad.err


def test_who_shows_certificates_in_vain_is_told_what_to_compare(
    still_cluster: RingCluster, ask: Ask, tmp_path: Path
) -> None:
    config, address = tmp_path / "tensorcache.toml", still_cluster.nodes[0].spec.address
    shown = Authority(tmp_path / "ca").issue("node-a")
    config.write_text(
        f'[node]\nid = "node-a"\ncluster = "test"\n[cluster]\nlisten = "{address}"\n'
        f'tls_cert = "{shown.tls_cert}"\ntls_key = "{shown.tls_key}"\ntls_ca = "{shown.tls_ca}"\n'
        f'[[cluster.members]]\nid = "node-a"\naddress = "{address}"\n'
    )
    said = ask("show", "--config", str(config))
    assert said.code == 1
    assert f"`tensorcache cert show {shown.tls_cert}`" in said.err
    assert "--host 127.0.0.1\n" in said.err
    assert "name the node's tensorcache.toml" not in said.err


def test_the_node_is_taken_from_a_config(cluster: RingCluster, ask: Ask, tmp_path: Path) -> None:
    config = tmp_path / "tensorcache.toml"
    address = cluster.nodes[0].spec.address
    config.write_text(
        f'[node]\nid = "node-a"\ncluster = "test"\n[cluster]\nlisten = "{address}"\n'
        f'[[cluster.members]]\nid = "node-a"\naddress = "{address}"\n'
    )
    assert ask("show", "--config", str(config)).code == 0
    config.write_text("[node]\n")
    alone = ask("show", "--config", str(config))
    assert alone.code == 2
    assert alone.err == (
        f"tensorcache: {config} has no [cluster] listen: name a node with --at HOST:PORT, "
        "or its tensorcache.toml with --config\n"
    )
