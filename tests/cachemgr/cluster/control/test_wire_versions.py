"""Releases N and N − 1 are peers both ways; nodes with nothing in common are not, and say so once."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cachemgr.cluster.control.grpc_service import GrpcChannel, GrpcServer, ask
from cachemgr.cluster.control.messages import (
    HELLO,
    LOOKUP,
    STATUS,
    HelloReply,
    LookupRequest,
    StatusRequest,
    encode_message,
)
from cachemgr.cluster.control.trouble import ControlTrouble, Trouble
from cachemgr.ring import NodeSpec, add_node, set_replicas
from tests.cachemgr.cluster.control.nodes import CLUSTER, Node, cluster, run
from tests.cachemgr.cluster.control.stores import FORMAT, chain
from tests.free_ports import free_ports

BLOCKS = chain("x", 2)
NAMES = [block.hash for block in BLOCKS]


async def restarted(node: Node, *, wires: tuple[int, int], folder: Path) -> Node:
    """The same node at the same address, of another release."""
    await node.close()
    return await Node(node.spec, node.rings.ring.state, folder, nodes=node.nodes, wires=wires).start()


async def newest(node: Node, epoch: int) -> None:
    async with asyncio.timeout(20):
        while node.rings.version.epoch < epoch:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("old", ["server", "client"])
def test_the_release_before_is_a_peer(tmp_path: Path, old: str) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "ab") as (a, b):
            aged = await restarted(b if old == "server" else a, wires=(1, 1), folder=tmp_path)
            a, b = (a, aged) if old == "server" else (aged, b)
            b.store.blocks.update({block.hash: block for block in BLOCKS})
            assert await a.to(b).lookup(FORMAT, NAMES, deadline=a.within()) == BLOCKS
            fetched = await a.to(b).get(a.store, BLOCKS, deadline=a.within())  # type: ignore[arg-type]
            assert fetched.arrived == (True, True)
            b.rings.install(set_replicas(b.rings.ring.state, 2))
            assert await a.to(b).lookup(FORMAT, NAMES, deadline=a.within()) == BLOCKS
            assert a.rings.version.epoch == 1, "the ring is not attached in wire version 1"
            await newest(a, 2)  # but asked for
            assert not a.to(b).troubles
            await aged.close()

    run(test)


def test_a_ring_is_attached_only_where_the_asker_knows_it(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "a") as (a,):
            channel = GrpcChannel(a.spec.address)
            for wire in (1, 2):
                request = LookupRequest(wire=wire, node="b", cluster=CLUSTER)
                reply = LOOKUP.decode_reply(
                    await channel.call(LOOKUP.name, encode_message(request), timeout_s=10.0)
                )
                assert reply.version == a.rings.version
                assert reply.ring == (a.rings.encoded if wire == 2 else b"")
            await channel.close()

    run(test)


@pytest.mark.parametrize("wires", [(3, 4), (7, 7)])
def test_nothing_in_common_is_no_peer_and_said_once(
    tmp_path: Path, wires: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "ab", breaker_s=0.05) as (a, b):
            newer = await restarted(b, wires=wires, folder=tmp_path)
            for _ in range(5):
                assert await a.to(b).lookup(FORMAT, NAMES, deadline=a.within()) == [None, None]
            peer = a.to(b)
            assert not peer.usable
            assert peer.status.state == "refused"
            assert peer.down_since is None, "it answers"
            assert peer.troubles["wire"] == 5
            assert "Lookup" not in newer.control.calls
            a.peers.start()
            older = await restarted(newer, wires=(1, 2), folder=tmp_path)
            async with asyncio.timeout(20):
                while not peer.usable:
                    await asyncio.sleep(0.005)
            await older.close()

    run(test)
    said = [record.getMessage() for record in caplog.records if "is not used" in record.getMessage()]
    assert said == [f"peer b is not used: speaks wire versions {wires[0]}..{wires[1]}, and we 1..2"]


def test_a_peer_replaced_behind_the_connection_is_greeted_again(tmp_path: Path) -> None:
    """Its release is another one, and the connection did not tell."""

    async def test() -> None:
        async with cluster(tmp_path, "ab") as (a, b):
            b.store.blocks.update({block.hash: block for block in BLOCKS})
            assert await a.to(b).lookup(FORMAT, NAMES, deadline=a.within()) == BLOCKS
            b.control._wires = (1, 1)
            assert await a.to(b).lookup(FORMAT, NAMES, deadline=a.within()) == BLOCKS
            assert b.control.calls == {"Hello": 2, "Lookup": 2, "refused": 1}
            assert not a.to(b).troubles

    run(test)


def test_another_cluster_is_no_peer_and_learns_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "ab") as (a, b):
            a.to(b)._control._cluster = "elsewhere"
            b.rings.install(set_replicas(b.rings.ring.state, 3))
            before = a.rings.version
            for _ in range(3):
                assert await a.to(b).exchange_ring(deadline=a.within()) is None
            assert a.rings.version == before
            assert a.to(b).troubles == {"cluster": 3}
            assert not a.to(b).usable
            assert b.control.calls == {"refused": 3}

    run(test)
    assert sum("is not used" in record.getMessage() for record in caplog.records) == 1


def test_another_node_at_the_address_is_no_peer(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "ab") as (a, b):
            a.rings.install(add_node(a.rings.ring.state, NodeSpec("c", b.spec.address)))
            assert await a.to("c").lookup(FORMAT, NAMES, deadline=a.within()) == [None, None]
            assert a.to("c").troubles == {"identity": 1}
            assert not a.to("c").usable
            assert a.to(b).usable

    run(test)


def test_a_person_of_another_release_or_cluster_is_told(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "a", wires=(3, 4)) as (a,):
            for name, kind in ((CLUSTER, Trouble.WIRE), ("elsewhere", Trouble.CLUSTER)):
                with pytest.raises(ControlTrouble) as trouble:
                    await asyncio.to_thread(
                        ask, a.spec.address, STATUS, StatusRequest(cluster=name), timeout_s=10.0
                    )
                assert trouble.value.kind is kind

    run(test)


def test_hostile_bytes_are_refused_and_the_server_lives_on(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "a") as (a,):
            channel = GrpcChannel(a.spec.address)
            head = {"wire": 2, "node": "b", "cluster": CLUSTER}
            hostile = [
                ("Lookup", b"\xff" * 100),
                ("Lookup", msgspec.msgpack.encode({**head, "names": b"odd"})),
                ("Pull", msgspec.msgpack.encode({**head, "format_id": FORMAT, "low": bytes(8), "high": b""})),
                ("Pull", msgspec.msgpack.encode({**head, "format_id": FORMAT, "moved": b"odd"})),
                ("Ring", msgspec.msgpack.encode({**head, "epoch": 9, "state": b"{}"})),
                ("Open", msgspec.msgpack.encode({**head, "node": ""})),
                ("Drain", b"\x91" * 50_000),
            ]
            for method, data in hostile:
                with pytest.raises(ControlTrouble) as trouble:
                    await channel.call(method, data, timeout_s=10.0)
                assert trouble.value.kind is Trouble.INVALID, (method, trouble.value)
            with pytest.raises(ControlTrouble) as trouble:
                await channel.call("Lookup", bytes((8 << 20) + 1), timeout_s=10.0)
            assert trouble.value.kind is Trouble.BUSY
            hello = HELLO.decode_reply(
                await channel.call("Hello", msgspec.msgpack.encode({"cluster": CLUSTER}), timeout_s=10.0)
            )
            assert hello.node == "a"
            assert a.control.calls == {"refused": len(hostile), "Hello": 1}
            await channel.close()

    run(test)


@pytest.mark.parametrize(
    "answer",
    [b"", b"\x80", b"\xc1" * 40, b"\x91" * 50_000, msgspec.msgpack.encode({"addresses": b"1"})],
    ids=["nothing", "empty", "garbage", "nested", "odd"],
)
def test_hostile_answers_are_misses(tmp_path: Path, answer: bytes) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "a") as (a,):
            async def hello(_: Any, __: Any) -> bytes:
                return encode_message(HelloReply(node="h", wire_min=1, wire_max=2))

            async def other(_: Any, __: Any) -> bytes:
                return answer

            (port,) = free_ports(1)
            server = GrpcServer({"Hello": hello, "Lookup": other, "Pull": other, "Ring": other})
            await server.start(f"127.0.0.1:{port}")
            a.rings.install(add_node(a.rings.ring.state, NodeSpec("h", f"127.0.0.1:{port}")))
            assert await a.to("h").lookup(FORMAT, NAMES, deadline=a.within()) == [None, None]
            assert a.to("h").troubles["garbage"] == 1
            await server.close(0.0)

    run(test)
