"""Inside TLS with certificates of the cluster's own authority, or on loopback, or not at all.

`127.1` is 127.0.0.1 by a name that nobody takes for loopback.
"""

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cachemgr import BlockFormat, SettingsError
from cachemgr.cluster.bulk.frames import PeerTrouble
from cachemgr.cluster.bulk.hello import BAD_TICKET, WELCOME, Hello, pack_hello, parse_welcome
from cachemgr.cluster.bulk.opening import BulkDoor
from cachemgr.cluster.bulk.tickets import TICKET_S
from cachemgr.cluster.certificates import Certificates, dns_name
from cachemgr.ring import NodeId
from tests.cachemgr.cluster.bulk.pair import (
    BIG,
    HUGE,
    OWNER,
    READER,
    Pair,
    addresses,
    fill,
    pair,
    run,
    whole,
)
from tests.cachemgr.cluster.certificates import CLUSTER, Authority, trusting
from tests.cachemgr.host import FORMAT, Clock, Host, chain

ELSEWHERE = "127.1"
FORMATS = pytest.mark.parametrize("block_format", [FORMAT, BIG, HUGE], ids=["tiny", "half MiB", "5 MiB"])


def by_address(door: BulkDoor) -> BulkDoor:
    return replace(door, host="127.0.0.1")


def both(authority: Authority) -> tuple[Certificates, Certificates]:
    """The owner's, and the reader's."""
    return authority.certificates(OWNER), authority.certificates(READER)


@FORMATS
def test_blocks_travel_inside_tls(host: Host, tmp_path: Path, block_format: BlockFormat) -> None:
    async def test() -> None:
        certificates = both(Authority(tmp_path))
        async with pair(host, block_format=block_format, blocks=5, listen=ELSEWHERE,
            certificates=certificates) as p:  # fmt: skip
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


def test_with_certificates_loopback_is_encrypted_too(host: Host, tmp_path: Path) -> None:
    async def test() -> None:
        async with pair(host, certificates=both(Authority(tmp_path))) as p:
            assert p.server.tls
            await serves(p)

    run(test)


def test_an_owner_that_is_another_node_is_refused(host: Host, tmp_path: Path) -> None:
    """Its certificate is sound, of our cluster, and names the host."""

    async def test() -> None:
        ours = Authority(tmp_path)
        async with pair(host, certificates=(ours.certificates("other"), ours.certificates(READER))) as p:
            fill(p.owner, chain(p.owner.cache, 2), FORMAT)
            with pytest.raises(PeerTrouble) as caught:
                await p.get(addresses(chain(p.owner.cache, 2)))
            assert caught.value.kind == "refused"
            assert not whole(p.reader.store, chain(p.owner.cache, 2), FORMAT)

    run(test)


@pytest.mark.parametrize("wrong", [{"uris": ["tensorcache://test/other"]}, {"uris": []}])
def test_an_owner_whose_uri_is_not_its_name_is_refused(
    host: Host, tmp_path: Path, wrong: dict[str, list[str]]
) -> None:
    """Its DNS name is right: what OpenSSL compares is not all that counts."""

    async def test() -> None:
        ours = Authority(tmp_path)
        served = ours.certificates(OWNER)
        shown = ours.issue(OWNER, **wrong)  # type: ignore[arg-type]
        served.loaded.server.load_cert_chain(shown.tls_cert, shown.tls_key)
        async with pair(host, certificates=(served, ours.certificates(READER))) as p:
            with pytest.raises(PeerTrouble, match="certificate") as caught:
                await p.get(addresses(chain(p.owner.cache, 2)))
            assert caught.value.kind == "refused"

    run(test)


def test_a_peer_cannot_talk_a_client_out_of_tls(host: Host, tmp_path: Path) -> None:
    async def test() -> None:
        def plain(door: BulkDoor) -> BulkDoor:
            return replace(door, tls=False)

        for listen in (ELSEWHERE, "127.0.0.1"):
            async with pair(host, listen=listen, certificates=both(Authority(tmp_path)), door=plain) as p:
                with pytest.raises(PeerTrouble) as caught:
                    await p.get(addresses(chain(p.owner.cache, 2)))
                assert caught.value.kind == "plaintext"

    run(test)


def test_a_client_without_certificates_comes_to_no_door_of_tls(host: Host, tmp_path: Path) -> None:
    async def test() -> None:
        async with pair(host, certificates=(Authority(tmp_path).certificates(OWNER), None)) as p:
            with pytest.raises(PeerTrouble) as caught:
                await p.get(addresses(chain(p.owner.cache, 2)))
            assert caught.value.kind == "plaintext"

    run(test)


def client_of(paths: object, *, sound: Authority) -> ssl.SSLContext:
    """A context that shows these certificates, whatever they are, and trusts the owner's authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(sound.path)
    if paths is not None:
        context.load_cert_chain(paths.tls_cert, paths.tls_key)  # type: ignore[attr-defined]
    return context


STRANGERS: dict[str, Callable[[Authority, Authority], object]] = {
    "no certificate": lambda ours, theirs: None,
    "self-signed": lambda ours, theirs: ours.issue(READER, self_signed=True),
    "another authority": lambda ours, theirs: theirs.issue(READER),
    "expired": lambda ours, theirs: ours.issue(READER, days=(-2, -1)),
    "not yet valid": lambda ours, theirs: ours.issue(READER, days=(1, 2)),
    "another cluster": lambda ours, theirs: ours.issue(READER, cluster="staging"),
    "another node": lambda ours, theirs: ours.issue("other"),
    "no uri": lambda ours, theirs: ours.issue(READER, uris=[]),
    "two uris": lambda ours, theirs: ours.issue(
        READER, uris=["tensorcache://test/reader", "tensorcache://test/other"]
    ),
    "a uri that is none": lambda ours, theirs: ours.issue(READER, uris=["tensorcache://test/reader/x"]),
}


async def answer(p: Pair, context: ssl.SSLContext, data: bytes) -> bytes:
    """All that the owner says to who says `data`, over a new connection; b"" if it lets him say nothing."""
    try:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", p.port, ssl=context, server_hostname=dns_name(CLUSTER, OWNER)
        )
    except OSError:
        return b""
    try:
        writer.write(data)
        async with asyncio.timeout(20):
            return await reader.read(200)
    except OSError:
        return b""
    finally:
        writer.transport.abort()


def refused(said: bytes) -> bool:
    return said == b"" or parse_welcome(said).reason == BAD_TICKET


def hello(ticket: bytes, node: NodeId = READER) -> bytes:
    return pack_hello(Hello((1, 2), ticket, node))


async def serves(p: Pair) -> None:
    """An honest reader gets his blocks."""
    names = chain(p.owner.cache, 2)
    p.reader.store.drop(names)
    if p.owner.cache.lookup(names) < len(names):
        fill(p.owner, names, FORMAT)
    assert (await p.get(addresses(names))).arrived == (True, True)
    assert whole(p.reader.store, names, FORMAT) == 2


@pytest.mark.parametrize("who", STRANGERS)
def test_who_is_not_one_of_us_is_refused_with_a_good_ticket(host: Host, tmp_path: Path, who: str) -> None:
    async def test() -> None:
        ours, theirs = Authority(tmp_path), Authority(tmp_path / "theirs")
        async with pair(host, certificates=both(ours)) as p:
            context = client_of(STRANGERS[who](ours, theirs), sound=ours)
            assert refused(await answer(p, context, hello(p.tickets.issue(READER))))
            sound = client_of(ours.issue(READER), sound=ours)
            assert parse_welcome(await answer(p, sound, hello(p.tickets.issue(READER)))).reason == WELCOME
            await serves(p)

    run(test)


def test_tickets_are_good_once_in_time_and_for_one_node(host: Host, tmp_path: Path) -> None:
    """What a node of the cluster could try with what it saw or guessed."""

    async def test() -> None:
        ours, clock = Authority(tmp_path), Clock()
        async with pair(host, certificates=both(ours)) as p:
            p.tickets._clock = clock
            reader, other = (client_of(ours.issue(node), sound=ours) for node in (READER, "other"))
            ticket = p.tickets.issue(READER)
            assert parse_welcome(await answer(p, reader, hello(ticket))).reason == WELCOME
            assert refused(await answer(p, reader, hello(ticket))), "a replay"
            ticket = p.tickets.issue(READER)
            assert refused(await answer(p, other, hello(ticket))), "stolen, as the reader"
            assert refused(await answer(p, reader, hello(ticket))), "used up by the thief"
            ticket = p.tickets.issue(READER)
            assert refused(await answer(p, other, hello(ticket, NodeId("other")))), "stolen, as himself"
            late = p.tickets.issue(READER)
            clock.now += TICKET_S
            assert refused(await answer(p, reader, hello(late)))
            assert refused(await answer(p, reader, hello(bytes(32)))), "guessed"
            await serves(p)

    run(test)


def test_a_client_of_tls_1_2_is_refused(host: Host, tmp_path: Path) -> None:
    async def test() -> None:
        ours = Authority(tmp_path)
        async with pair(host, certificates=both(ours)) as p:
            old = client_of(ours.issue(READER), sound=ours)
            old.maximum_version = ssl.TLSVersion.TLSv1_2
            assert await answer(p, old, hello(p.tickets.issue(READER))) == b""
            await serves(p)

    run(test)


def test_a_server_of_tls_1_2_is_refused(host: Host, tmp_path: Path) -> None:
    async def test() -> None:
        served, reads = both(Authority(tmp_path))
        served.loaded.server.minimum_version = ssl.TLSVersion.TLSv1_2
        served.loaded.server.maximum_version = ssl.TLSVersion.TLSv1_2
        async with pair(host, certificates=(served, reads)) as p:
            with pytest.raises(PeerTrouble, match=r"(?i)version"):
                await p.get(addresses(chain(p.owner.cache, 2)))

    run(test)


def test_new_certificates_are_used_and_old_authorities_forgotten(host: Host, tmp_path: Path) -> None:
    """Two authorities are trusted while the nodes change from one to the other."""

    async def test() -> None:
        old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
        ca = {node: tmp_path / f"{node}.ca" for node in (OWNER, READER)}

        def have(node: NodeId, of: Authority, *trusted: Authority) -> Certificates:
            paths = trusting(of.issue(node, as_files=node), *trusted, at=ca[node])
            return Certificates(paths.files, cluster=CLUSTER, node=node)

        def change(node: NodeId, have: Certificates, of: Authority, *trusted: Authority) -> None:
            paths = of.issue(node, as_files=node)
            for name in ("crt", "key"):
                (of.folder / f"{node}.{name}").replace(old.folder / f"{node}.{name}")
            trusting(paths, *trusted, at=ca[node])
            have.look()

        certificates = have(OWNER, old, old), have(READER, old, old)
        async with pair(host, certificates=certificates) as p:
            await serves(p)
            for node, have_now in zip((OWNER, READER), certificates, strict=True):
                change(node, have_now, old, old, new)
            for node, have_now in zip((OWNER, READER), certificates, strict=True):
                change(node, have_now, new, old, new)
                await serves(p)
            for node, have_now in zip((OWNER, READER), certificates, strict=True):
                change(node, have_now, new, new)
                await serves(p)
            assert [one.generation for one in certificates] == [4, 4]
            stranger = client_of(old.issue(READER), sound=new)
            assert refused(await answer(p, stranger, hello(p.tickets.issue(READER))))
            await serves(p)

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


def test_without_certificates_no_door_off_loopback_is_come_to(host: Host) -> None:
    """Whatever the other side says of where its door is."""

    async def test() -> None:
        def far(door: BulkDoor) -> BulkDoor:
            return replace(door, host=ELSEWHERE)

        async with pair(host, door=far) as p:
            with pytest.raises(PeerTrouble) as caught:
                await p.get(addresses(chain(p.owner.cache, 2)))
            assert caught.value.kind == "plaintext"

    run(test)


def test_plaintext_is_a_setting(host: Host) -> None:
    async def test() -> None:
        async with pair(host, listen=ELSEWHERE, bulk_plaintext=True) as p:
            names = chain(p.owner.cache, 2)
            fill(p.owner, names, FORMAT)
            assert not p.server.tls
            assert (await p.get(addresses(names))).arrived == (True, True)

    run(test)
