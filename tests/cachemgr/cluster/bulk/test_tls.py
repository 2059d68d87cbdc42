"""Off loopback there is TLS with certificates of the cluster's own authority, or nothing.

`127.1` is 127.0.0.1 by a name that nobody takes for loopback.
"""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from cachemgr import BlockFormat, SettingsError
from cachemgr.cluster.bulk.frames import PeerTrouble
from cachemgr.cluster.bulk.opening import BulkDoor
from cachemgr.cluster.bulk.tls import client_context, server_context
from tests.cachemgr.cluster.bulk.certificates import Authority
from tests.cachemgr.cluster.bulk.pair import BIG, HUGE, addresses, fill, pair, run, whole
from tests.cachemgr.host import FORMAT, Host, chain

ELSEWHERE = "127.1"
FORMATS = pytest.mark.parametrize("block_format", [FORMAT, BIG, HUGE], ids=["tiny", "half MiB", "5 MiB"])


def by_address(door: BulkDoor) -> BulkDoor:
    return replace(door, host="127.0.0.1")


@FORMATS
def test_blocks_travel_inside_tls(host: Host, tmp_path: Path, block_format: BlockFormat) -> None:
    async def test() -> None:
        tls = Authority(tmp_path).contexts()
        async with pair(
            host, block_format=block_format, blocks=5, listen=ELSEWHERE, tls=tls, door=by_address
        ) as p:
            assert p.server.tls
            names, given = chain(p.owner.cache, 2), chain(p.reader.cache, 2, seed=1)
            fill(p.owner, names, block_format)
            fill(p.reader, given, block_format)
            fetched, taken = await asyncio.gather(p.get(addresses(names)), p.put(given))
            assert fetched.arrived == (True,) * 2
            assert taken == [True] * 2
            assert whole(p.reader.store, names, block_format) == 2
            assert whole(p.owner.store, given, block_format) == 2
            assert len(p.doors) == 1

    run(test)


@pytest.mark.parametrize("which", ["authority of the client", "authority of the server", "address"])
def test_who_is_not_of_the_cluster_is_refused(host: Host, tmp_path: Path, which: str) -> None:
    async def test() -> None:
        ours = Authority(tmp_path)
        (tmp_path / "strange").mkdir()
        strange = Authority(tmp_path / "strange")
        server, client = ours.contexts()
        if which == "authority of the client":
            client = client_context(*strange.node("reader"), ours.path)
        elif which == "authority of the server":
            server = server_context(*strange.node("owner"), ours.path)
        else:
            server = server_context(*ours.node("owner", address="10.0.0.1"), ours.path)
        async with pair(host, listen=ELSEWHERE, tls=(server, client), door=by_address) as p:
            with pytest.raises(PeerTrouble) as caught:
                await p.get(addresses(chain(p.owner.cache, 2)))
            assert caught.value.kind in ("refused", "broken")

    run(test)


def test_a_peer_cannot_talk_a_client_out_of_tls(host: Host, tmp_path: Path) -> None:
    async def test() -> None:
        tls = Authority(tmp_path).contexts()

        def plain(door: BulkDoor) -> BulkDoor:
            return replace(door, tls=False)

        async with pair(host, listen=ELSEWHERE, tls=tls, door=plain) as p:
            with pytest.raises(PeerTrouble) as caught:
                await p.get(addresses(chain(p.owner.cache, 2)))
            assert caught.value.kind == "plaintext"

    run(test)


@pytest.mark.parametrize(
    ("name", "plaintext", "kind"),
    [("no host", False, "malformed"), ("a..b", True, "refused"), ("x" * 64, True, "refused")],
)
def test_a_door_that_is_no_address_is_trouble(host: Host, name: str, plaintext: bool, kind: str) -> None:
    async def test() -> None:
        def nowhere(door: BulkDoor) -> BulkDoor:
            return replace(door, host=name)

        async with pair(host, door=nowhere, bulk_plaintext=plaintext) as p:
            with pytest.raises(PeerTrouble) as caught:
                await p.get(addresses(chain(p.owner.cache, 2)))
            assert caught.value.kind == kind

    run(test)


def test_without_certificates_nothing_is_served_off_loopback(host: Host) -> None:
    async def test() -> None:
        with pytest.raises(SettingsError, match="bulk_plaintext"):
            async with pair(host, listen=ELSEWHERE):
                """Not reached."""

    run(test)


def test_plaintext_is_a_setting(host: Host) -> None:
    async def test() -> None:
        async with pair(host, listen=ELSEWHERE, bulk_plaintext=True) as p:
            names = chain(p.owner.cache, 2)
            fill(p.owner, names, FORMAT)
            assert not p.server.tls
            assert (await p.get(addresses(names))).arrived == (True, True)

    run(test)


def test_on_loopback_there_is_none(host: Host, tmp_path: Path) -> None:
    async def test() -> None:
        async with pair(host, tls=Authority(tmp_path).contexts()) as p:
            assert not p.server.tls

    run(test)
