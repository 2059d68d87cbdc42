"""Homes of a cluster: what each node is told, what all share, and when the ring on disk is forgotten."""

import shutil
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from cachemgr import CacheSecrets
from engines import generate_signing_key, sign_release
from scripts.cluster.homes import arenas_of, lay_out_cluster, require_room, settings_text
from scripts.cluster.plan import ClusterPlan
from scripts.errors import UsageError


@pytest.fixture
def made(small_release: Path, tmp_path: Path) -> ClusterPlan:
    private, public = generate_signing_key(tmp_path / "keys")
    release = tmp_path / "release"
    shutil.copytree(small_release, release)
    sign_release(release, private)
    return ClusterPlan(
        home=tmp_path / "cluster", count=3, release=release, key=public, model="small",
        host_bytes=1 << 20, lanes=2,
    )  # fmt: skip


def test_homes_differ_in_name_and_ports_alone(made: ClusterPlan) -> None:
    lay_out_cluster(made)
    told = [tomllib.loads((node.home / "tensorcache.toml").read_text()) for node in made.nodes]
    assert [one["node"] for one in told] == [
        {"cluster": "demo", "id": f"node-{number}"} for number in (1, 2, 3)
    ]
    assert [one["cluster"]["listen"] for one in told] == [f"127.0.0.1:80{n}5" for n in (0, 1, 2)]
    members = [{"id": f"node-{n}", "address": f"127.0.0.1:80{n - 1}5"} for n in (1, 2, 3)]
    assert [one["cluster"]["members"] for one in told] == [members] * 3
    for node, one in zip(made.nodes, told, strict=True):
        secrets = CacheSecrets.load(node.home / one["secrets"]["dir"])
        assert secrets.naming == CacheSecrets.load(made.home / "secrets").naming
        (key,) = one["trust"]["keys"]
        assert (node.home / key).read_bytes() == made.key.read_bytes()
        assert (node.home / "model_repository" / "small" / "1" / "current").exists()
        assert (node.home / "backends" / "tensorcache" / "model.py").exists()
        config = (node.home / "model_repository" / "small" / "config.pbtxt").read_text()
        assert config.count('key: "lanes" value { string_value: "2" }') == 1


def test_laid_out_again_it_is_the_same_cluster(made: ClusterPlan) -> None:
    lay_out_cluster(made)
    ring = made.nodes[0].home / "cluster" / "ring.json"
    ring.parent.mkdir()
    ring.write_text("kept")
    naming = (made.home / "secrets" / "naming.key").read_bytes()
    lay_out_cluster(made)
    assert ring.read_text() == "kept"
    assert (made.home / "secrets" / "naming.key").read_bytes() == naming
    config = (made.nodes[0].home / "model_repository" / "small" / "config.pbtxt").read_text()
    assert config.count("lanes") == 1 + config.partition("parameters")[0].count("lanes")


def test_with_other_members_the_ring_begins_anew_on_every_node(made: ClusterPlan) -> None:
    lay_out_cluster(made)
    for node in made.nodes:
        (node.home / "cluster").mkdir()
        (node.home / "cluster" / "ring.json").write_text("of three")
    two = ClusterPlan(
        home=made.home, count=2, release=made.release, key=made.key, model="small", host_bytes=1 << 20
    )
    lay_out_cluster(two)
    assert [(node.home / "cluster").exists() for node in made.nodes] == [False, False, True]


def test_a_key_that_is_not_there_is_said(made: ClusterPlan, tmp_path: Path) -> None:
    plan = ClusterPlan(home=made.home, count=1, release=made.release, key=tmp_path / "none.pub")
    with pytest.raises(UsageError, match=r"none\.pub is not a file: run `make sign`"):
        lay_out_cluster(plan)
    assert not made.home.exists()


def test_too_large_host_tiers_are_refused_with_what_fits(made: ClusterPlan, tmp_path: Path) -> None:
    large = ClusterPlan(home=made.home, count=3, release=made.release, key=made.key, host_bytes=1 << 50)
    with pytest.raises(UsageError, match=r"use fewer --nodes, or --host-bytes [0-9]+$"):
        require_room(large, tmp_path)


def test_arenas_of_the_nodes_count_as_room(made: ClusterPlan, tmp_path: Path) -> None:
    """A cluster that filled the memory can be started again."""
    space = shutil.disk_usage(tmp_path).free
    plan = ClusterPlan(
        home=made.home, count=1, release=made.release, key=made.key, host_bytes=space + (1 << 40)
    )
    with pytest.raises(UsageError):
        require_room(plan, tmp_path)
    with (tmp_path / "tensorcache_demo_node-1_v1_0_0.arena").open("wb") as arena:
        arena.truncate(1 << 41)  # sparse
    require_room(plan, tmp_path)
    assert len(arenas_of(plan, plan.nodes[0], tmp_path)) == 1


def test_names_cannot_break_out_of_the_settings(made: ClusterPlan) -> None:
    odd = ClusterPlan(
        home=made.home, count=1, release=made.release, key=made.key, cluster='a"\n[trust]\nkeys = ["/evil"]'
    )
    told = tomllib.loads(settings_text(odd, odd.nodes[0]))
    assert told["trust"] == {"keys": ["../keys/release.pub"]}


def test_another_cluster_in_the_same_homes_has_a_ring_of_its_own(made: ClusterPlan) -> None:
    lay_out_cluster(made)
    ring = made.nodes[0].home / "cluster" / "ring.json"
    ring.parent.mkdir()
    ring.write_text("that of the other cluster")
    lay_out_cluster(replace(made, cluster="other"))
    assert not ring.exists()
