"""What a bulk connection reads: heads, hellos, bodies. MalformedFrame, or it encodes equally."""

from cachemgr.cluster.bulk.frames import (
    FROM_CLIENT,
    FROM_SERVER,
    HEAD_NBYTES,
    MalformedFrame,
    pack_head,
    parse_head,
)
from cachemgr.cluster.bulk.hello import (
    HELLO_NBYTES,
    WELCOME_NBYTES,
    Hello,
    Welcome,
    common_version,
    pack_hello,
    pack_welcome,
    parse_hello,
    parse_welcome,
)
from cachemgr.cluster.bulk.messages import Ended, PlacedFile, Places, Request, decode, encode
from cachemgr.ring import NodeId
from tests.fuzz.contract import plain
from tests.fuzz.source import Source

_BODIES = (Request, Places, Ended)
EXAMPLES = (
    b"\x00" + pack_head(3, 7, 1000),
    b"\x01" + pack_head(10, 7, 1000),
    b"\x00" + pack_head(4, 7, 2**32 - 1),
    b"\x02" + pack_hello(Hello((1, 2), bytes(32), NodeId("node-1"))),
    b"\x03" + pack_welcome(Welcome(2, 0, NodeId("node-1"))),
    b"\x04" + encode(Request(bytes(16), 1, bytes(16), 1000, bytes(48), True)),
    b"\x05" + encode(Places((PlacedFile("/dev/shm/x.arena", 1, 2),), (0, -1), (128, 0))),
    b"\x06" + encode(Ended("done", 1, bytes(16), {bytes(16): 3})),
    b"\x04\x95" + b"\xc6\xff\xff\xff\xff" * 5,
    b"\x05\xdd\xff\xff\xff\xff",
    b"\x06" + b"\x91" * 20_000,
    b"\x06\x93\xd9\xff" + b"\x1b" * 255,
)


def target(data: bytes) -> None:
    source = Source(data)
    kind, body = source.byte() % 7, source.rest()
    try:
        _read(kind, body)
    except MalformedFrame as error:
        plain(error)


def _read(kind: int, body: bytes) -> None:
    if kind < 2:
        accepted = (FROM_CLIENT, FROM_SERVER)[kind]
        head = parse_head(body[:HEAD_NBYTES].ljust(HEAD_NBYTES, b"\0"), accepted)
        assert head.kind in accepted
        assert head.length <= 5 << 20
        assert pack_head(head.kind, head.request, head.length) == body[:HEAD_NBYTES].ljust(HEAD_NBYTES, b"\0")
    elif kind == 2:
        padded = body[:HELLO_NBYTES].ljust(HELLO_NBYTES, b"\0")
        hello = parse_hello(padded)
        assert pack_hello(hello) == padded
        assert 0 <= common_version((1, 2), hello.versions) <= 2
    elif kind == 3:
        padded = body[:WELCOME_NBYTES].ljust(WELCOME_NBYTES, b"\0")
        assert pack_welcome(parse_welcome(padded)) == padded
    else:
        message = decode(body, _BODIES[kind - 4])
        assert decode(encode(message), type(message)) == message
        if isinstance(message, Request):
            assert b"".join(message.blocks) == message.names
            assert 1 <= len(message.blocks) <= 1024
