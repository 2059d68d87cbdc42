"""How long a connection inside TLS lives: until new certificates are in force, or for a while at most."""

import asyncio
from pathlib import Path

import pytest

from cachemgr.cluster.bulk import ages
from cachemgr.cluster.bulk.hello import WELCOME, parse_welcome
from cachemgr.cluster.certificates import Certificates, dns_name
from tests.cachemgr.cluster.bulk.pair import OWNER, READER, addresses, fill, pair, run
from tests.cachemgr.cluster.bulk.test_tls import client_of, hello
from tests.cachemgr.cluster.certificates import CLUSTER, Authority
from tests.cachemgr.host import FORMAT, Host, chain


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ages, "_LOOK_S", 0.01)
    monkeypatch.setattr(ages, "GRACE_S", 0.1)


def renewed(certificates: Certificates, authority: Authority, node: str) -> None:
    authority.issue(node, as_files=node)
    before = certificates.generation
    certificates.look()
    assert certificates.generation == before + 1


@pytest.mark.parametrize("whose", [OWNER, READER])
def test_new_certificates_of_either_side_make_a_new_connection(
    host: Host, tmp_path: Path, whose: str
) -> None:
    async def test() -> None:
        ours = Authority(tmp_path)
        owns, reads = (ours.certificates(node, as_files=node) for node in (OWNER, READER))
        async with pair(host, certificates=(owns, reads)) as p:
            names = chain(p.owner.cache, 2)
            fill(p.owner, names, FORMAT)
            assert (await p.get(addresses(names))).arrived == (True, True)
            assert p.client.connected
            renewed(owns if whose == OWNER else reads, ours, whose)
            while p.client.connected or p.server._connections:
                await asyncio.sleep(0.01)
            p.reader.store.drop(names)
            assert (await p.get(addresses(names))).arrived == (True, True)
            assert len(p.doors) == 2

    run(test)


def test_a_connection_lives_for_a_while_at_most(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ages, "AGE_S", 0.05)

    async def test() -> None:
        ours = Authority(tmp_path)
        async with pair(host, certificates=(ours.certificates(OWNER), ours.certificates(READER))) as p:
            names = chain(p.owner.cache, 2)
            fill(p.owner, names, FORMAT)
            for _ in range(3):
                p.reader.store.drop(names)
                assert (await p.get(addresses(names))).arrived == (True, True)
                while p.client.connected or p.server._connections:
                    await asyncio.sleep(0.01)
            assert len(p.doors) == 3
            assert p.server._ages._timer is None, "it looks after nobody"

    run(test)


def test_who_does_not_leave_is_cut_off(host: Host, tmp_path: Path) -> None:
    """One who was let in by what is trusted no more, and does not care that he is asked to go."""

    async def test() -> None:
        ours = Authority(tmp_path)
        owns = ours.certificates(OWNER, as_files=OWNER)
        async with pair(host, certificates=(owns, ours.certificates(READER))) as p:
            context = client_of(ours.issue(READER), sound=ours)
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", p.port, ssl=context, server_hostname=dns_name(CLUSTER, OWNER)
            )
            writer.write(hello(p.tickets.issue(READER)))
            assert parse_welcome(await reader.readexactly(70)).reason == WELCOME
            renewed(owns, ours, OWNER)
            async with asyncio.timeout(20):
                while await reader.read(1000):
                    """It was asked to go; then it is gone."""
            writer.transport.abort()
            assert not p.server._connections

    run(test)
