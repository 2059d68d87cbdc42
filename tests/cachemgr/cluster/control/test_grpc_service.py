"""What carries the messages: deadlines, typed errors, TLS, ports, and an end that leaves nothing behind."""

import asyncio
import logging
import threading
from pathlib import Path

import pytest

from cachemgr.cluster.control.grpc_service import GrpcChannel, GrpcServer, ask
from cachemgr.cluster.control.host_token import host_token
from cachemgr.cluster.control.messages import STATUS, StatusRequest
from cachemgr.cluster.control.trouble import ControlTrouble, Trouble
from cachemgr.errors import SettingsError
from cachemgr.ring import NodeId
from tests.cachemgr.cluster.control.nodes import CLUSTER, cluster, run
from tests.free_ports import free_ports


async def echo(data: bytes, _: NodeId | None) -> bytes:
    return data


async def never(_: bytes, __: NodeId | None) -> bytes:
    await asyncio.Event().wait()
    return b""


async def fails(_: bytes, __: NodeId | None) -> bytes:
    raise ZeroDivisionError("a secret")


async def refuses(_: bytes, __: NodeId | None) -> bytes:
    raise ControlTrouble(Trouble.CLUSTER, "not yours")


HANDLERS = {"Echo": echo, "Never": never, "Fails": fails, "Refuses": refuses}


async def kind_of(channel: GrpcChannel, method: str, *, timeout_s: float = 10.0) -> Trouble:
    with pytest.raises(ControlTrouble) as trouble:
        await channel.call(method, b"x", timeout_s=timeout_s)
    assert "a secret" not in str(trouble.value)
    return trouble.value.kind


def test_what_goes_wrong_has_a_kind(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        server = GrpcServer(HANDLERS)
        port = await server.start("127.0.0.1:0")
        channel = GrpcChannel(f"127.0.0.1:{port}")
        assert await channel.call("Echo", b"hello", timeout_s=10.0) == b"hello"
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert await kind_of(channel, "Never", timeout_s=0.1) is Trouble.DEADLINE
        assert loop.time() - began < 1.0
        assert await kind_of(channel, "Fails") is Trouble.FAILED
        assert await kind_of(channel, "Refuses") is Trouble.CLUSTER
        assert await kind_of(channel, "Nothing") is Trouble.UNKNOWN
        await server.close(0.0)
        assert await kind_of(channel, "Echo") is Trouble.REFUSED
        await channel.close()
        assert await kind_of(channel, "Echo") is Trouble.CLOSED

    run(test)
    assert "control call Fails failed" in caplog.text


def test_a_channel_closed_under_a_call_is_no_cancellation_of_its_caller() -> None:
    async def test() -> None:
        server = GrpcServer(HANDLERS)
        channel = GrpcChannel(f"127.0.0.1:{await server.start('127.0.0.1:0')}")
        running = asyncio.create_task(kind_of(channel, "Never"))
        cancelled = asyncio.create_task(channel.call("Never", b"", timeout_s=10.0))
        await asyncio.sleep(0.05)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await channel.close()
        assert await running is Trouble.LOST
        await server.close(0.0)

    run(test)


def test_a_server_that_closes_finishes_what_runs() -> None:
    async def test() -> None:
        began, end = asyncio.Event(), asyncio.Event()

        async def slow(data: bytes, caller: NodeId | None) -> bytes:
            began.set()
            await end.wait()
            return data

        server = GrpcServer({"Slow": slow})
        channel = GrpcChannel(f"127.0.0.1:{await server.start('127.0.0.1:0')}")
        running = asyncio.create_task(channel.call("Slow", b"done", timeout_s=10.0))
        await began.wait()
        closing = asyncio.create_task(server.close(10.0))
        await asyncio.sleep(0.05)
        assert not closing.done()
        end.set()
        assert await running == b"done"
        await closing
        await channel.close()

    run(test)


def test_a_port_in_use_is_refused_by_name() -> None:
    async def test() -> None:
        first, second = GrpcServer(HANDLERS), GrpcServer(HANDLERS)
        port = await first.start("127.0.0.1:0")
        with pytest.raises(SettingsError, match=f"listen: must be a free address of this host, .*:{port}"):
            await second.start(f"127.0.0.1:{port}")
        await first.close(0.0)
        await second.start(f"127.0.0.1:{port}")
        await second.close(0.0)

    run(test)


def test_nobody_there_is_told_at_once_and_from_any_thread() -> None:
    (port,) = free_ports(1)
    with pytest.raises(ControlTrouble) as trouble:
        ask(f"127.0.0.1:{port}", STATUS, StatusRequest(), timeout_s=10.0)
    assert trouble.value.kind is Trouble.REFUSED


def test_a_node_lives_and_ends_on_a_thread_of_its_own_again_and_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As the IO thread does; its loop is not that of the main thread, nor that of the node before."""
    caplog.set_level(logging.WARNING)
    failed: list[BaseException] = []

    async def test(folder: Path) -> None:
        async with cluster(folder, "ab", breaker_s=0.05) as (a, b):
            for node in (a, b):
                node.peers.start()
            assert await a.to(b).exchange_ring(deadline=a.within()) is not None
            assert (await asyncio.to_thread(
                ask, b.spec.address, STATUS, StatusRequest(cluster=CLUSTER), timeout_s=10.0
            )).status.node == "b"  # fmt: skip

    def io(folder: Path) -> None:
        try:
            asyncio.run(test(folder))
        except BaseException as error:
            failed.append(error)

    for turn in range(3):
        thread = threading.Thread(target=io, args=(tmp_path / str(turn),))
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
    assert failed == []
    assert caplog.messages == []


def test_the_token_of_a_host_is_one_for_those_who_share_its_memory(tmp_path: Path) -> None:
    assert host_token(tmp_path) == host_token(tmp_path)
    assert len(host_token(tmp_path)) == 16
    assert host_token(tmp_path) != host_token(Path("/proc"))
    assert host_token(tmp_path / "nowhere") != host_token(tmp_path / "nowhere")
