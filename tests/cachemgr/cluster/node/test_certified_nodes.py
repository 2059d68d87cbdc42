"""Whole nodes with certificates: blocks go over, new ones are taken under load, strangers get nothing."""

import logging
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from cachemgr import CacheSettings, ClusterSettings
from cachemgr.cluster.bulk import ages
from cachemgr.cluster.certificates import Certificates
from cachemgr.cluster.certificates.loading import LoadedCertificates
from cachemgr.cluster.control.grpc_service import ask
from cachemgr.cluster.control.messages import OPEN, STATUS, OpenRequest, StatusRequest
from cachemgr.cluster.control.trouble import ControlTrouble, Trouble
from cachemgr.joining import open_beyond
from cachemgr.ring import NodeSpec
from tests.cachemgr.cluster.certificates import CLUSTER, Authority, Paths, trusting
from tests.cachemgr.cluster.node.cluster_rig import Node, nodes, read_within
from tests.cachemgr.cluster.node.test_node import node_of
from tests.cachemgr.host import chain, fill
from tests.free_ports import free_ports
from tests.waiting import wait_until

PROMPT = 20


def certificates_of(node: Node) -> Certificates:
    found = node_of(node.cluster).out.certificates
    assert found is not None
    return found


def peer_figures(node: Node) -> dict[str, float]:
    return dict(node.cluster.counters()["peer"])


@pytest.mark.parametrize("same_host", [True, False])
def test_what_one_node_committed_another_restores(
    tmp_path: Path, shared_memory: Path, same_host: bool
) -> None:
    authority = Authority(tmp_path / "ca")
    with nodes(tmp_path, shared_memory, authority=authority, same_host=same_host) as (a, b, c):
        names = chain(a.cache, PROMPT)
        fill(a.cache, names)
        wait_until(lambda: a.committed(names) >= 2)
        assert read_within(b, names) == PROMPT
        assert read_within(c, names) == PROMPT
        fetched = [node.cache.counters()["cache_fetched_blocks_total"] for node in (b, c)]
        assert sum(fetched) > 0, "each block was where it was read"
        listening = node_of(a.cluster).listening
        assert listening is not None
        assert listening._door.tls
        figures = peer_figures(a)
        assert 29 * 86_400 < figures["cluster_certificate_expires_seconds"] <= 30 * 86_400
        assert figures["cluster_foreign_callers_total"] == 0


def trouble_of(node: Node, paths: Paths, request: OpenRequest) -> Trouble:
    tls = ClusterSettings(tls_cert=paths.tls_cert, tls_key=paths.tls_key, tls_ca=paths.tls_ca)
    with pytest.raises(ControlTrouble) as caught:
        ask(node.spec.address, OPEN, request, timeout_s=10, settings=tls)
    return caught.value.kind


def test_who_is_not_one_of_us_gets_nothing_of_a_whole_node(tmp_path: Path, shared_memory: Path) -> None:
    ours, theirs = Authority(tmp_path / "ca"), Authority(tmp_path / "theirs")
    with nodes(tmp_path, shared_memory, 2, authority=ours) as (a, b):
        as_b = OpenRequest(cluster=CLUSTER, node="n2")
        strange = trusting(theirs.issue("n2"), ours, theirs, at=tmp_path / "both")
        assert trouble_of(a, strange, as_b) is Trouble.LOST
        assert trouble_of(a, ours.issue("n3"), as_b) is Trouble.IDENTITY
        assert trouble_of(a, ours.issue("n3"), OpenRequest(cluster=CLUSTER, node="n3")) is Trouble.BUSY
        with pytest.raises(ControlTrouble):
            ask(a.spec.address, STATUS, StatusRequest(cluster=CLUSTER), timeout_s=10)
        names = chain(a.cache, PROMPT)
        fill(a.cache, names)
        wait_until(lambda: a.committed(names) >= 2)
        assert read_within(b, names) == PROMPT


def test_new_certificates_under_load_cost_no_request(
    tmp_path: Path, shared_memory: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From one authority to another, as the command's help says. A miss would be no loss; an error is."""
    monkeypatch.setattr(ages, "GRACE_S", 1.0)
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    with nodes(tmp_path, shared_memory, 2, authority=old, same_host=False, blocks=16_384) as (a, b):
        stop, asked, came, failed = threading.Event(), [0, 0], [0, 0], []

        def read(writes: Node, reads: Node, which: int) -> None:
            """Every prompt is a new one, so that it has to come over."""
            while not stop.wait(0.01):
                names = chain(writes.cache, 4, seed=2 * asked[which] + which)
                try:
                    fill(writes.cache, names)
                    came[which] += read_within(reads, names)
                except Exception as error:
                    failed.append(error)
                    return
                asked[which] += 1

        def until_taken(what: Callable[[LoadedCertificates], bool]) -> None:
            """Both nodes have it, and blocks came over since."""
            wait_until(lambda: all(what(certificates_of(node).loaded) for node in (a, b)), limit_s=20)
            before = [*came]
            wait_until(
                lambda: failed or all(now > then + 20 for now, then in zip(came, before, strict=True)),
                limit_s=20,
            )

        threads = [threading.Thread(target=read, args=(*pair, n)) for n, pair in enumerate(((a, b), (b, a)))]
        for thread in threads:
            thread.start()
        try:
            both = old.path.read_bytes() + new.path.read_bytes()
            old.path.write_bytes(both)
            until_taken(lambda loaded: loaded.ca == both)
            certs = set()
            for node in (a.spec.id, b.spec.id):
                paths = new.issue(node)
                certs.add(Path(paths.tls_cert).read_bytes())
                Path(paths.tls_cert).replace(old.folder / f"{node}.crt")
                Path(paths.tls_key).replace(old.folder / f"{node}.key")
            until_taken(lambda loaded: loaded.cert in certs)
            old.path.write_bytes(new.path.read_bytes())
            until_taken(lambda loaded: loaded.ca == new.path.read_bytes())
        finally:
            stop.set()
            for thread in threads:
                thread.join(60)
        assert failed == []
        former = old.issue("n2")
        (tmp_path / "both").write_bytes(both)
        former = Paths(former.tls_cert, former.tls_key, str(tmp_path / "both"))
        assert trouble_of(a, former, OpenRequest(cluster=CLUSTER, node="n2")) is Trouble.LOST
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_in_the_clear_nothing_is_sent_to_another_host(
    tmp_path: Path, shared_memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A ring may name any address: that of 127.1 is not known to be of this host."""
    far_port, port = free_ports(2)
    with socket.create_server(("127.0.0.1", far_port)) as far:
        far.settimeout(0)
        members = (NodeSpec("n1", f"127.0.0.1:{port}"), NodeSpec("n2", f"127.1:{far_port}"))
        cache = CacheSettings(cluster=CLUSTER, node="n1", host_bytes=0, directory=str(shared_memory))
        settings = ClusterSettings(
            listen=f"127.0.0.1:{port}", members=members, state_dir=str(tmp_path / "n1"), breaker_s=0.05
        )
        node = open_beyond(cache, settings)
        try:
            wait_until(lambda: node.counters()["peer"].get("cluster_peer_trouble_plaintext_total", 0) > 3)
        finally:
            node.close()
        with pytest.raises(BlockingIOError):
            far.accept()
    lines = [line for line in caplog.messages if "without certificates" in line]
    assert len(lines) == 1
    assert "n2 is not used" in lines[0]
