"""Whatever bytes come, a reader of frames ends with a typed refusal, and has reserved nothing for them."""

import asyncio
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachemgr.cluster.bulk.channel import Channel
from cachemgr.cluster.bulk.frames import (
    BLOCK,
    FROM_CLIENT,
    FROM_SERVER,
    HEAD_NBYTES,
    REQUEST_BLOCKS,
    SLICE,
    SLICE_NBYTES,
    MalformedFrame,
    pack_frame,
    pack_head,
    parse_head,
)
from cachemgr.cluster.bulk.hello import (
    HELLO_NBYTES,
    WELCOME_NBYTES,
    Hello,
    Welcome,
    pack_hello,
    pack_welcome,
    parse_hello,
    parse_welcome,
)
from cachemgr.cluster.bulk.incoming import IncomingBlock
from cachemgr.cluster.bulk.messages import Ended, PlacedFile, Places, Request, decode, encode
from cachemgr.cluster.bulk.streams import StreamEnded
from cachemgr.ring import NodeId

VERSION = (1, bytes(16))
REQUEST = Request(bytes(16), *VERSION, 1000, bytes(16))


class ByteStream:
    """Gives what it has, a few bytes at a time."""

    def __init__(self, data: bytes, *, step: int) -> None:
        self.data, self.step = data, step

    def try_receive(self, into: memoryview) -> int:
        if not self.data:
            raise StreamEnded("no more")
        part, self.data = self.data[: min(self.step, len(into))], self.data[min(self.step, len(into)) :]
        into[: len(part)] = part
        return len(part)

    async def receivable(self, wanted: int) -> None:
        """There is always something, or the end."""

    def try_send(self, views: object) -> int:
        return 0

    def when_sendable(self, callback: object) -> None:
        """Never."""

    def not_sending(self) -> None:
        """It never is."""

    def close(self) -> None:
        """Nothing."""


class Refusing:
    """A handler that has no request under way."""

    def __init__(self) -> None:
        self.frames: list[tuple[int, int, int]] = []

    def on_frame(self, kind: int, request: int, body: bytes) -> None:
        self.frames.append((kind, request, len(body)))

    def begin_block(self, request: int, index: int, header: bytes) -> IncomingBlock:
        raise MalformedFrame("block", "of a request", request)

    def end_block(self, request: int, index: int, block: IncomingBlock) -> None:
        raise AssertionError("none has begun")


def read_all(data: bytes, accepts: frozenset[int], *, step: int = 1 << 20) -> tuple[Exception, Refusing]:
    handler = Refusing()

    async def read() -> Exception:
        channel = Channel(ByteStream(data, step=step), accepts=accepts, handler=handler, clock=lambda: 0.0)
        try:
            await channel.run()
        except (MalformedFrame, StreamEnded) as error:
            return error
        raise AssertionError("it never ends by itself")

    return asyncio.run(read()), handler


@given(st.binary(max_size=300), st.sampled_from([FROM_CLIENT, FROM_SERVER]), st.integers(1, 40))
def test_any_bytes_end_in_a_typed_refusal(data: bytes, accepts: frozenset[int], step: int) -> None:
    read_all(data, accepts, step=step)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 2**32 - 1), st.binary(max_size=64)), max_size=8))
def test_what_looks_like_frames_ends_so_too(frames: list[tuple[int, int, bytes]]) -> None:
    data = b"".join(pack_frame(kind, request, body) for kind, request, body in frames)
    _, handler = read_all(data, FROM_CLIENT)
    said = [(kind, request, len(body)) for kind, request, body in frames]
    assert said[: len(handler.frames)] == handler.frames


@given(st.binary(min_size=HEAD_NBYTES, max_size=HEAD_NBYTES))
def test_a_head_is_within_limits_or_refused(data: bytes) -> None:
    with suppress(MalformedFrame):
        head = parse_head(data, FROM_SERVER)
        assert head.kind in FROM_SERVER
        assert head.length <= SLICE_NBYTES + 132
        assert pack_head(head.kind, head.request, head.length) == data


@pytest.mark.parametrize("kind", [BLOCK, SLICE])
def test_a_slice_has_a_bound(kind: int) -> None:
    with pytest.raises(MalformedFrame, match="length of kind"):
        parse_head(pack_head(kind, 1, SLICE_NBYTES + 133), FROM_SERVER)


@given(st.binary(max_size=200))
def test_no_message_decodes_to_anything_but_itself(data: bytes) -> None:
    for kind in (Request, Places, Ended):
        with suppress(MalformedFrame):
            message = decode(data, kind)  # type: ignore[type-var]
            assert decode(encode(message), kind) == message  # type: ignore[type-var, arg-type]


def request(**changes: object) -> Request:
    values = {"format_id": bytes(16), "epoch": 1, "digest": bytes(16), "budget_ms": 5, "names": bytes(32)}
    return Request(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "message",
    [
        request(names=bytes(16 * (REQUEST_BLOCKS + 1))),
        request(names=b""),
        request(format_id=bytes(15)),
        request(digest=bytes(17)),
        request(budget_ms=-1),
        request(epoch=-1),
        Places((PlacedFile("", 1, 1),), (0,), (0,)),
        Places((PlacedFile("/x", 1, 1),), (0,), (-1,)),
        Ended("fine", 1, bytes(16)),  # type: ignore[arg-type]
        Ended("done", 1, bytes(16), {b"short": 1}),
    ],
)
def test_messages_out_of_their_limits_are_refused(message: Request | Places | Ended) -> None:
    with pytest.raises(MalformedFrame):
        decode(encode(message), type(message))  # type: ignore[type-var]


@pytest.mark.parametrize(
    "body",
    [
        [bytes(16), 1, bytes(16), 5, bytes(17), False],
        [[["/x", 1, 1]], [0, 0], [0]],
        [[["/x", 1, 1]], [1], [0]],
        [[], [-2], [0]],
    ],
)
def test_messages_that_contradict_themselves_are_refused(body: list[object]) -> None:
    import msgspec

    kind = Request if len(body) == 6 else Places
    with pytest.raises(MalformedFrame):
        decode(msgspec.msgpack.encode(body), kind)


@given(
    st.binary(min_size=HELLO_NBYTES, max_size=HELLO_NBYTES),
    st.binary(min_size=WELCOME_NBYTES, max_size=WELCOME_NBYTES),
)
def test_handshakes_parse_or_are_refused(hello: bytes, welcome: bytes) -> None:
    for data in (hello, b"TCBK" + hello[4:]):
        with suppress(MalformedFrame):
            parse_hello(data)
    for data in (welcome, b"TCBK" + welcome[4:]):
        with suppress(MalformedFrame):
            parse_welcome(data)


@pytest.mark.parametrize("kind", [Request, Places, Ended])
def test_what_is_nested_without_end_is_refused(kind: type[Request] | type[Places] | type[Ended]) -> None:
    more = encode({Request: REQUEST, Places: Places((), (), ()), Ended: Ended("done", *VERSION)}[kind])
    fields = more[0] + 1  # one more than there are: skipped, however deep it is
    with pytest.raises(MalformedFrame):
        decode(bytes([fields]) + more[1:] + b"\x91" * 60_000 + b"\xc0", kind)


def test_handshakes_are_what_they_were() -> None:
    hello = Hello((1, 2), bytes(range(32)), NodeId("n" * 63))
    assert parse_hello(pack_hello(hello)) == hello
    welcome = Welcome(2, 0, NodeId("a.b-c"))
    assert parse_welcome(pack_welcome(welcome)) == welcome
