"""The control client over made-up channels: one Hello for all, no channel left open, nothing sent twice."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from cachemgr.cluster.control.client import ControlClient
from cachemgr.cluster.control.messages import (
    DRAIN,
    HELLO,
    DrainReply,
    DrainRequest,
    HelloReply,
    encode_message,
)
from cachemgr.cluster.control.trouble import ControlTrouble, Trouble
from cachemgr.cluster.rings import RingsInForce
from cachemgr.ring import NodeId, RingFile
from tests.cachemgr.cluster.control.nodes import CLUSTER, run


class FakeChannel:
    """Answers at once unless told to wait; remembers what was sent, and that it was closed."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.ready = asyncio.Event()
        self.ready.set()
        self.trouble: dict[str, Trouble] = {}
        self.closed = False

    async def call(self, method: str, request: bytes, *, timeout_s: float) -> bytes:
        self.sent.append(method)
        try:
            await asyncio.wait_for(self.ready.wait(), timeout_s)
        except TimeoutError:
            raise ControlTrouble(Trouble.DEADLINE, f"{method}: no answer in time") from None
        if method in self.trouble:
            raise ControlTrouble(self.trouble[method], method)
        reply = HelloReply(node="b", wire_min=1, wire_max=2) if method == HELLO.name else DrainReply()
        return encode_message(reply)

    async def close(self, grace_s: float = 0.0) -> None:
        if grace_s:
            await asyncio.sleep(grace_s)
        self.closed = True


class Channels(list[FakeChannel]):
    def connect(self, address: str) -> FakeChannel:
        self.append(FakeChannel())
        return self[-1]


def client_of(channels: Channels, folder: Path) -> ControlClient:
    rings = RingsInForce(NodeId("a"), file=RingFile(folder / "ring.json"), previous_s=600.0)
    return ControlClient(
        NodeId("b"), "127.0.0.1:2", cluster=CLUSTER, rings=rings, connect=channels.connect, call_s=60.0,
        clock=asyncio.get_running_loop().time,
    )  # fmt: skip


def drain(client: ControlClient, seconds: float = 10.0) -> "asyncio.Task[DrainReply]":
    deadline = asyncio.get_running_loop().time() + seconds
    return asyncio.create_task(client.call(DRAIN, DrainRequest(), deadline=deadline))


async def kind(task: "asyncio.Task[DrainReply]") -> Trouble:
    with pytest.raises(ControlTrouble) as trouble:
        await task
    return trouble.value.kind


def test_a_slow_hello_outlives_the_call_that_began_it(tmp_path: Path) -> None:
    async def test() -> None:
        channels = Channels()
        client = client_of(channels, tmp_path)
        channels[0].ready.clear()
        assert await kind(drain(client, 0.02)) is Trouble.DEADLINE
        waiting = [drain(client) for _ in range(3)]
        await asyncio.sleep(0.01)
        channels[0].ready.set()
        await asyncio.gather(*waiting)
        assert channels[0].sent == ["Hello", "Drain", "Drain", "Drain"]
        await client.close()

    run(test)


def test_a_hello_that_failed_is_said_again_by_the_next_call(tmp_path: Path) -> None:
    async def test() -> None:
        channels = Channels()
        client = client_of(channels, tmp_path)
        channels[0].trouble["Hello"] = Trouble.REFUSED
        calls = [drain(client) for _ in range(3)]
        assert [await kind(call) for call in calls] == [Trouble.REFUSED] * 3
        del channels[0].trouble["Hello"]
        await drain(client)
        assert channels[0].sent.count("Hello") <= 4
        assert channels[0].sent[-2:] == ["Hello", "Drain"]
        await client.close()

    run(test)


@pytest.mark.parametrize(
    ("trouble", "sent"),
    [
        (Trouble.LOST, ["Hello", "Drain", "Hello", "Drain"]),
        (Trouble.REFUSED, ["Hello", "Drain", "Hello", "Drain"]),
        (Trouble.DEADLINE, ["Hello", "Drain", "Drain"]),
        (Trouble.FAILED, ["Hello", "Drain", "Drain"]),
        (Trouble.WIRE, ["Hello", "Drain", "Hello", "Drain", "Drain"]),
    ],
)
def test_who_broke_the_connection_is_greeted_again_and_nothing_is_sent_twice(
    tmp_path: Path, trouble: Trouble, sent: list[str]
) -> None:
    async def test() -> None:
        channels = Channels()
        client = client_of(channels, tmp_path)
        channels[0].trouble["Drain"] = trouble
        assert await kind(drain(client)) is trouble
        del channels[0].trouble["Drain"]
        await drain(client)
        assert channels[0].sent == sent
        await client.close()

    run(test)


@pytest.mark.parametrize("during", ["nothing", "hello", "call"])
def test_closing_leaves_no_channel_open_and_no_caller_waiting(tmp_path: Path, during: str) -> None:
    async def test() -> None:
        channels = Channels()
        client = client_of(channels, tmp_path)
        now: Callable[[], float] = asyncio.get_running_loop().time
        for _ in range(3):
            await client.greet(deadline=now() + 10.0)
        assert [channel.closed for channel in channels[:-1]] == [False] * 3, "calls under way have their time"
        if during != "nothing":
            channels[-1].ready.clear()
        if during == "hello":
            client._hello = None
        waiting = drain(client, 0.2)
        await asyncio.sleep(0.01)
        await client.close()
        assert [channel.closed for channel in channels] == [True] * 4
        if during == "hello":
            assert await kind(waiting) is Trouble.CLOSED
        elif during == "call":
            assert await kind(waiting) is Trouble.DEADLINE
        assert await kind(drain(client)) is Trouble.CLOSED

    run(test)
