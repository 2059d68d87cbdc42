"""Whole nodes: what one committed, the others restore; also when it is gone, or replaced."""

import gc
import logging
import socket
import threading
import time
import weakref
from pathlib import Path

import pytest

from cachemgr import CacheError, CacheSettings, ClusterSettings, SettingsError, open_cache
from cachemgr.cluster.control.grpc_service import ask
from cachemgr.cluster.control.messages import OPEN, STATUS, NodeStatus, OpenRequest, StatusRequest
from cachemgr.cluster.control.trouble import ControlTrouble, Trouble
from cachemgr.cluster.node import ClusterNode
from cachemgr.cluster.node_lock import NodeLock
from cachemgr.joining import open_beyond
from cachemgr.ring import KeptRings, NodeId, NodeSpec, ReplacedRing, RingFile, add_node, first_state
from cachemgr.tiers.beyond import OpenedBeyond
from tests.cachemgr.cluster.node.cluster_rig import Node, nodes, read_within
from tests.cachemgr.host import FORMAT, SECRETS, chain, fill, write
from tests.free_ports import free_ports
from tests.waiting import wait_until

PROMPT = 40


def node_of(process: OpenedBeyond) -> ClusterNode:
    node = process.sources.node
    assert node is not None
    return node


@pytest.mark.parametrize("same_host", [True, False])
def test_what_one_node_committed_any_restores(
    tmp_path: Path, shared_memory: Path, same_host: bool
) -> None:
    with nodes(tmp_path, shared_memory, same_host=same_host) as (a, b, c):
        names = chain(a.cache, PROMPT)
        fill(a.cache, names)
        wait_until(lambda: a.committed(names) >= 2)
        assert read_within(b, names) == PROMPT
        assert read_within(c, names) == PROMPT
        fetched = [node.cache.counters()["cache_fetched_blocks_total"] for node in (b, c)]
        assert sum(fetched) > 0, "each block was where it was read"


def test_a_replica_answers_when_the_writer_is_gone(tmp_path: Path, shared_memory: Path) -> None:
    with nodes(tmp_path, shared_memory) as (a, b, c):
        names = chain(a.cache, PROMPT)
        fill(a.cache, names)
        wait_until(lambda: a.committed(names) >= 2)
        a.close()
        assert read_within(b, names) == PROMPT
        assert read_within(c, names) == PROMPT


def test_a_node_that_comes_back_is_warm_and_serves(tmp_path: Path, shared_memory: Path) -> None:
    with nodes(tmp_path, shared_memory) as (a, b, c):
        names = chain(a.cache, PROMPT)
        fill(a.cache, names)
        wait_until(lambda: a.committed(names) >= 2)
        a.close()
        a.open()
        assert a.cache.lookup(names) == PROMPT
        for other in (b, c):
            wait_until(lambda other=other: status(other).members[0].state in ("closed", "unknown"))
            assert read_within(other, names) == PROMPT


def test_a_cold_prompt_is_a_miss_at_once(tmp_path: Path, shared_memory: Path) -> None:
    with nodes(tmp_path, shared_memory) as (a, b, _):
        started = time.monotonic()
        assert read_within(a, chain(b.cache, PROMPT, seed=7)) == 0
        assert time.monotonic() - started < 10


def test_only_one_process_of_a_node_listens_and_the_next_takes_over(
    tmp_path: Path, shared_memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with nodes(tmp_path, shared_memory, 2) as (a, _), caplog.at_level(logging.INFO):
        second = open_beyond(a.cache_settings, a.settings)
        try:
            assert "another process of it listens" in caplog.text
            assert node_of(second).listening is None
            names = chain(a.cache, 3)
            write(a.cache, names, 0)
            a.close()
            wait_until(lambda: node_of(second).listening is not None)
            assert status(a).node == "n1"
        finally:
            second.close()


def test_another_process_of_a_node_follows_the_rings_on_disk(tmp_path: Path, shared_memory: Path) -> None:
    cache = CacheSettings(cluster="test", node="n1", host_bytes=0, directory=str(shared_memory))
    settings = ClusterSettings(
        listen="127.0.0.1:7400", redis="redis://127.0.0.1:1", state_dir=str(tmp_path / "n1")
    )
    listens = NodeLock(tmp_path / "n1")
    assert listens.take()
    file = RingFile(tmp_path / "n1" / "ring.json")
    alone = first_state([NodeSpec("n1", "127.0.0.1:7400")], replicas=1)
    both = add_node(alone, NodeSpec("n2", "127.0.0.1:7401"))
    process = open_beyond(cache, settings)
    try:
        assert not node_of(process).out.rings.known
        file.save(KeptRings(alone, (), time.time(), True))
        wait_until(lambda: node_of(process).out.rings.known)
        file.save(KeptRings(both, (ReplacedRing(alone, time.time()),), time.time(), False))
        wait_until(lambda: node_of(process).out.rings.version == both.version)
        wait_until(lambda: node_of(process).out.peers.peer(NodeId("n2")) is not None)
        assert not node_of(process).out.rings.pulled
        file.save(KeptRings(both, (), time.time(), True))
        wait_until(lambda: node_of(process).out.rings.pulled)
    finally:
        process.close()
        listens.release()


def test_a_cache_that_was_closed_is_counted_and_not_kept(tmp_path: Path, shared_memory: Path) -> None:
    with nodes(tmp_path, shared_memory, 1) as (a,):
        store = next(iter(a.cluster._doors))
        a.cluster._doors[store]._counts.dropped_offers = 7
        a.cache.close()
        assert not a.cluster._doors
        kept = weakref.ref(store)
        del store
        gc.collect()
        wait_until(lambda: a.cluster.counters()[""].get("beyond_dropped_offers_total") == 7)
        a.cache = open_cache(FORMAT, a.cache_settings, SECRETS, remote=a.cluster.tiers)
        gc.collect()
        assert kept() is None
        assert a.cluster.counters()[""].get("beyond_dropped_offers_total") == 7


def test_nothing_is_left_after_close(tmp_path: Path, shared_memory: Path) -> None:
    before = set(threading.enumerate())
    with nodes(tmp_path, shared_memory, 2) as (a, b):
        read_within(a, chain(b.cache, 4))
    left = {thread for thread in set(threading.enumerate()) - before if thread.is_alive()}
    ours = {thread.name for thread in left if "_poll_wrapper" not in thread.name}  # gRPC's own, for good
    assert ours == set()


def test_a_taken_port_is_said_and_the_node_asks_on(
    tmp_path: Path, shared_memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with nodes(tmp_path, shared_memory, 2) as (a, b):
        names = chain(a.cache, 4)
        fill(a.cache, names)
        wait_until(lambda: a.committed(names) >= 2)
        settings = ClusterSettings(
            listen=a.spec.address, members=(a.spec, b.spec), state_dir=str(tmp_path / "third")
        )
        third = open_beyond(a.cache_settings, settings)
        third.close()
        assert "does not listen: listen: must be a free address" in caplog.text


def test_certificates_that_are_not_there_are_refused(tmp_path: Path, shared_memory: Path) -> None:
    with nodes(tmp_path, shared_memory, 1) as (a,):
        missing = str(tmp_path / "no.pem")
        settings = ClusterSettings(
            listen="127.0.0.1:0", members=(a.spec,), state_dir=str(tmp_path / "tls"),
            tls_cert=missing, tls_key=missing, tls_ca=missing,
        )  # fmt: skip
        with pytest.raises(SettingsError, match=r"tls_cert: must be a readable PEM file"):
            open_beyond(a.cache_settings, settings)


@pytest.mark.parametrize(
    "wrong", [{"domain": "Rack 1"}, {"listen": "127.0.0.1:0"}, {"advertise": "127.0.0.1:0"}]
)
def test_what_cannot_be_on_a_ring_is_refused_by_every_process_of_a_node(
    tmp_path: Path, shared_memory: Path, wrong: dict[str, str]
) -> None:
    settings = ClusterSettings(**{"listen": "127.0.0.1:7400", "redis": "redis://127.0.0.1:1", **wrong},
        state_dir=str(tmp_path / "n1"))
    cache = CacheSettings(cluster="test", node="n1", host_bytes=0, directory=str(shared_memory))
    listens = NodeLock(tmp_path / "n1")
    assert listens.take()
    with pytest.raises(CacheError, match=r"^(domain|address): must be"):
        open_beyond(cache, settings)
    listens.release()


def test_status_tells_what_a_node_holds(tmp_path: Path, shared_memory: Path) -> None:
    with nodes(tmp_path, shared_memory, 2) as (a, b):
        names = chain(a.cache, 5)
        fill(a.cache, names)
        wait_until(lambda: status(b).blocks == 5)
        assert status(a).formats[0].blocks == 5
        assert [member.node for member in status(a).members] == ["n2"]


def test_a_node_that_looks_for_its_ring_counts_answers_and_leaves(
    tmp_path: Path, shared_memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    [port] = free_ports(1)
    before = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        settings = ClusterSettings(
            listen=f"127.0.0.1:{port}",
            redis=f"redis://127.0.0.1:{silent.getsockname()[1]}",
            state_dir=str(tmp_path / "n1"),
        )
        cache = CacheSettings(cluster="test", node="n1", host_bytes=0, directory=str(shared_memory))
        node = open_beyond(cache, settings)
        try:
            wait_until(lambda: "cluster_move_settled" in node.counters().get("peer", {}), limit_s=3)
            assert node.counters()["peer"]["cluster_epoch"] == 0
            asked = OpenRequest(cluster="test", node="n2")
            with pytest.raises(ControlTrouble, match="looking for the ring") as refused:
                ask(settings.listen, OPEN, asked, timeout_s=10)
            assert refused.value.kind is Trouble.BUSY
        finally:
            node.close()
    assert NodeLock(tmp_path / "n1").take(), "the lock was kept"
    assert not [one.name for one in set(threading.enumerate()) - before if one.name.startswith("cache")]
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []


def status(node: Node) -> NodeStatus:
    return ask(node.spec.address, STATUS, StatusRequest(cluster="test"), timeout_s=10).status
