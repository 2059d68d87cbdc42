"""Control calls between nodes that show certificates: each is who its certificate says, or is not heard."""

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from cachemgr.cluster.certificates import Certificates, dns_name
from cachemgr.cluster.control.grpc_service import GrpcChannel, ask
from cachemgr.cluster.control.messages import (
    HELLO,
    OPEN,
    PULL,
    STATUS,
    HelloRequest,
    Method,
    OpenRequest,
    PullRequest,
    Request,
    StatusRequest,
    encode_message,
)
from cachemgr.cluster.control.trouble import ControlTrouble, Trouble
from cachemgr.errors import SettingsError
from cachemgr.ring import NodeId, NodeSpec, add_node, remove_node
from tests.cachemgr.cluster.certificates import CLUSTER, Authority, Paths, trusting
from tests.cachemgr.cluster.control.nodes import Node, cluster, run, settings

A = NodeId("a")


def shown(paths: Paths, *, trusts: Authority) -> Certificates:
    """What a channel needs of `Certificates`, of files that no node of ours would take."""
    loaded = SimpleNamespace(
        ca=Path(trusts.path).read_bytes(),
        key=Path(paths.tls_key).read_bytes() if paths.tls_key else None,
        cert=Path(paths.tls_cert).read_bytes() if paths.tls_cert else None,
    )
    return SimpleNamespace(loaded=loaded, generation=1, cluster=CLUSTER)  # type: ignore[return-value]


async def say(channel: GrpcChannel, method: Method, request: Request) -> bytes:  # type: ignore[type-arg]
    request.cluster, request.wire = CLUSTER, 2
    return await channel.call(method.name, encode_message(request), timeout_s=10.0)


async def trouble_of(channel: GrpcChannel, method: Method, request: Request) -> Trouble:  # type: ignore[type-arg]
    with pytest.raises(ControlTrouble) as caught:
        await say(channel, method, request)
    return caught.value.kind


STRANGERS: dict[str, tuple[Callable[[Authority, Authority], Paths], Trouble]] = {
    "no certificate": (lambda ours, theirs: Paths("", "", str(ours.path)), Trouble.LOST),
    "self-signed": (lambda ours, theirs: ours.issue("b", self_signed=True), Trouble.LOST),
    "another authority": (lambda ours, theirs: theirs.issue("b"), Trouble.LOST),
    "expired": (lambda ours, theirs: ours.issue("b", days=(-2, -1)), Trouble.LOST),
    "not yet valid": (lambda ours, theirs: ours.issue("b", days=(1, 2)), Trouble.LOST),
    "another cluster": (lambda ours, theirs: ours.issue("b", cluster="staging"), Trouble.IDENTITY),
    "another node": (lambda ours, theirs: ours.issue("c"), Trouble.IDENTITY),
    "no uri": (lambda ours, theirs: ours.issue("b", uris=[]), Trouble.IDENTITY),
    "two uris": (
        lambda ours, theirs: ours.issue("b", uris=["tensorcache://test/b", "tensorcache://test/c"]),
        Trouble.IDENTITY,
    ),
}


@pytest.mark.parametrize("who", STRANGERS)
def test_who_is_not_one_of_us_is_refused(tmp_path: Path, who: str) -> None:
    async def test() -> None:
        ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
        make, kind = STRANGERS[who]
        async with cluster(tmp_path, "ab", authority=ours) as (a, b):
            certificates = shown(make(ours, theirs), trusts=ours)
            channel = GrpcChannel(a.spec.address, certificates=certificates, node=A)
            for method, request in ((OPEN, OpenRequest(node="b")), (HELLO, HelloRequest(node="b"))):
                assert await trouble_of(channel, method, request) is kind
            await channel.close()
            assert not a.tickets._waiting, "a ticket was given away"
            assert await b.to(a).exchange_ring(deadline=b.within()) is not None

    run(test)


def test_who_speaks_without_tls_is_refused(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "ab", authority=Authority(tmp_path)) as (a, b):
            plain = GrpcChannel(a.spec.address)
            assert await trouble_of(plain, HELLO, HelloRequest()) is Trouble.LOST
            await plain.close()
            assert await b.to(a).exchange_ring(deadline=b.within()) is not None

    run(test)


def test_the_newest_tls_is_spoken(tmp_path: Path) -> None:
    """With who can speak it: nobody between two nodes can talk them down."""

    async def test() -> None:
        ours = Authority(tmp_path)
        async with cluster(tmp_path, "a", authority=ours) as (a,):
            context = ours.certificates("b").loaded.client
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.set_alpn_protocols(["h2"])
            _, writer = await asyncio.open_connection(
                "127.0.0.1", a.port, ssl=context, server_hostname=dns_name(CLUSTER, "a")
            )
            assert writer.get_extra_info("ssl_object").version() == "TLSv1.3"
            writer.transport.abort()

    run(test)


@pytest.mark.parametrize("who", ["c", "staging"])
def test_a_sound_certificate_of_another_node_is_no_proof_of_being_this_one(tmp_path: Path, who: str) -> None:
    """The client's side: it names the host, and its authority is ours."""

    async def test() -> None:
        ours = Authority(tmp_path)
        other = {"c": {"node": "c"}, "staging": {"node": "a", "cluster": "staging"}}[who]
        false = Certificates(ours.issue(**other).files, cluster=other.get("cluster", CLUSTER))
        async with cluster(tmp_path, "a", certificates=false) as (a,):
            channel = GrpcChannel(a.spec.address, certificates=ours.certificates("b"), node=A)
            assert await trouble_of(channel, HELLO, HelloRequest(node="b")) is Trouble.LOST
            await channel.close()
            assert not a.control.calls, "it was asked"

    run(test)


def test_ids_with_dots_are_told_apart(tmp_path: Path) -> None:
    async def test() -> None:
        ours = Authority(tmp_path)
        true = Certificates(ours.issue("a", cluster="b.c").files, cluster="b.c")
        false = Certificates(ours.issue("a.b", cluster="c").files, cluster="c")
        async with cluster(tmp_path, "a", certificates=true, cluster="b.c") as (a,):
            right = GrpcChannel(a.spec.address, certificates=true, node=A)
            request = HelloRequest(cluster="b.c")
            assert await right.call(HELLO.name, encode_message(request), timeout_s=10.0)
            wrong = GrpcChannel(a.spec.address, certificates=false, node=NodeId("a.b"))
            assert await trouble_of(wrong, HELLO, HelloRequest()) is Trouble.LOST
            for channel in (right, wrong):
                await channel.close()

    run(test)


def test_a_node_on_no_ring_gets_no_blocks_until_it_is_on_one(tmp_path: Path) -> None:
    """Its certificate is sound, as that of a node that joins, or of one that was removed for good."""

    async def test() -> None:
        ours = Authority(tmp_path)
        async with cluster(tmp_path, "ab", authority=ours) as (a, _):
            channel = GrpcChannel(a.spec.address, certificates=ours.certificates("z"), node=A)
            listing = PullRequest(node="z", format_id=a.store.format_id)
            assert await trouble_of(channel, OPEN, OpenRequest(node="z")) is Trouble.BUSY
            assert await trouble_of(channel, PULL, listing) is Trouble.BUSY
            assert await trouble_of(channel, PULL, PullRequest(format_id=b"")) is Trouble.IDENTITY
            assert await say(channel, STATUS, StatusRequest()), "people may ask"
            a.rings.install(add_node(a.rings.ring.state, NodeSpec("z", "127.0.0.1:9")))
            assert await say(channel, OPEN, OpenRequest(node="z"))
            await channel.close()

    run(test)


def test_a_node_that_was_removed_has_time_to_give_its_blocks_away(tmp_path: Path) -> None:
    async def test() -> None:
        ours = Authority(tmp_path)
        async with cluster(tmp_path, "ab", authority=ours) as (a, _):
            a.rings.install(remove_node(a.rings.ring.state, "b"))
            channel = GrpcChannel(a.spec.address, certificates=ours.certificates("b"), node=A)
            assert await say(channel, OPEN, OpenRequest(node="b"))
            a.rings._previous_s = 0.0
            a.rings.mark_pulled(a.rings.version)
            assert await trouble_of(channel, OPEN, OpenRequest(node="b")) is Trouble.BUSY
            await channel.close()

    run(test)


def test_a_node_that_joins_shows_its_ring_to_who_does_not_know_it(tmp_path: Path) -> None:
    async def test() -> None:
        ours = Authority(tmp_path)
        async with cluster(tmp_path, "ab", authority=ours) as (a, _):
            z = NodeSpec("z", "127.0.0.1:9")
            state = add_node(a.rings.ring.state, z)
            joining = Node(z, state, tmp_path, nodes={}, authority=ours)
            peer = joining.to(a)
            with pytest.raises(Exception, match="no ring that is known"):
                await peer._open_door()
            while a.rings.version != state.version:
                await asyncio.sleep(0.01)
            assert (await peer._open_door()).ticket
            await joining.close()

    run(test)


def test_new_certificates_are_used_and_old_authorities_forgotten(tmp_path: Path) -> None:
    """While calls go on, none of which fails."""

    async def test() -> None:
        old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")

        def place(node: str, of: Authority, *trusted: Authority) -> Paths:
            paths = of.issue(node, as_files=node)
            for name in ("crt", "key"):
                (of.folder / f"{node}.{name}").replace(tmp_path / f"{node}.{name}")
            here = Paths(str(tmp_path / f"{node}.crt"), str(tmp_path / f"{node}.key"), paths.tls_ca)
            return trusting(here, *trusted, at=tmp_path / f"{node}.ca")

        async with cluster(tmp_path, "a", certificates=_placed(place("a", old, old), "a")) as (a,):
            certificates = _placed(place("b", old, old), "b")
            assert a.certificates is not None
            channel = GrpcChannel(a.spec.address, certificates=certificates, node=A)
            request = HelloRequest(node="b")
            stop, failed, made = asyncio.Event(), [], 0

            async def go_on() -> None:
                nonlocal made
                while not stop.is_set():
                    try:
                        await say(channel, HELLO, request)
                    except ControlTrouble as trouble:
                        failed.append(trouble)
                    made += 1

            loops = [asyncio.create_task(go_on()) for _ in range(4)]
            for of, trusted in ((old, (old, new)), (new, (old, new)), (new, (new,))):
                for node, have in (("a", a.certificates), ("b", certificates)):
                    place(node, of, *trusted)
                    have.look()
                    before = made
                    while made < before + 8:
                        await asyncio.sleep(0.01)
            stop.set()
            await asyncio.gather(*loops)
            assert failed == []
            assert channel._generation == a.certificates.generation == 4
            former = shown(old.issue("b"), trusts=new)
            stranger = GrpcChannel(a.spec.address, certificates=former, node=A)
            assert await trouble_of(stranger, HELLO, HelloRequest()) is Trouble.LOST
            await stranger.close()
            await channel.close()

    run(test)


def _placed(paths: Paths, node: str) -> Certificates:
    return Certificates(paths.files, cluster=CLUSTER, node=NodeId(node))


def test_people_ask_with_a_certificate_of_any_node(tmp_path: Path) -> None:
    async def test() -> None:
        ours, theirs = Authority(tmp_path), Authority(tmp_path / "theirs")

        async def status(paths: Paths, *, name: str = CLUSTER) -> str:
            files = {"tls_cert": paths.tls_cert, "tls_key": paths.tls_key, "tls_ca": paths.tls_ca}
            reply = await asyncio.to_thread(
                ask, a.spec.address, STATUS, StatusRequest(cluster=name),
                timeout_s=10.0, settings=settings(**files),
            )  # fmt: skip
            return reply.status.node

        async with cluster(tmp_path, "a", authority=ours) as (a,):
            assert await status(ours.issue("operator")) == "a"
            with pytest.raises(ControlTrouble):
                await status(theirs.issue("operator"))
            with pytest.raises(SettingsError, match="tls_cert: must be the certificate of a node"):
                await status(ours.issue("operator", cluster="staging"))
        async with cluster(tmp_path / "2", "a", certificates=Certificates(
            ours.issue("a", hosts=["10.0.0.7"]).files, cluster=CLUSTER
        )) as (a,):  # fmt: skip
            with pytest.raises(ControlTrouble):
                await status(ours.issue("operator"))

    run(test)
