"""A server that answers anything: every call is answered or fails as its peer's trouble, nothing is left."""

import asyncio
import struct

import msgspec

from cachemgr.cluster.bulk.client_calls import GetCall, PutCall
from cachemgr.cluster.bulk.client_channel import ClientChannel
from cachemgr.cluster.bulk.frames import (
    ABSENT,
    ACK,
    ACKED,
    BLOCK,
    BLOCK_META,
    END,
    GOAWAY,
    PLACES,
    RUN,
    SLICE,
    WANT,
    PeerTrouble,
    pack_frame,
)
from cachemgr.cluster.bulk.messages import Ended, PlacedFile, Places, Request, encode
from cachemgr.cluster.bulk.same_host import PeerArenas, bring
from cachemgr.shard import HEADER_NBYTES
from tests.cachemgr.cluster.bulk.pair import READER, FixedRings
from tests.fuzz.blocks import BLOCKS, HELD, nodes
from tests.fuzz.contract import plain
from tests.fuzz.loop import FedStream, run
from tests.fuzz.source import Source

_END = encode(Ended("done", 1, bytes(16)))
_ALL = b"".join(
    pack_frame(BLOCK, 1, BLOCK_META.pack(index) + nodes().shard(index)) for index in range(HELD)
) + pack_frame(ABSENT, 1, RUN.pack(HELD, BLOCKS - HELD))


def _places() -> bytes:
    held = nodes().near.hold_one(nodes().names[0])
    place = held.place
    nodes().near.store.let_go([held])
    file = PlacedFile(place.path, place.device, place.inode)
    return pack_frame(PLACES, 1, encode(Places((file,), (0,) + (-1,) * 7, (place.offset,) + (0,) * 7)))


_CUT = nodes().shard(0)
_NOWHERE = msgspec.msgpack.encode([[["/none.arena", 1, 2]], [5] * 8, [0] * 8])
"""Blocks of a file that is not named."""
EXAMPLES = tuple(
    bytes([piece]) + frames
    for piece, frames in (
        (255, _ALL + pack_frame(END, 1, _END)),
        (5, _ALL + pack_frame(END, 1, _END)),
        (255, _places() + pack_frame(END, 1, _END)),
        (255, pack_frame(BLOCK, 1, BLOCK_META.pack(0) + _CUT[:160]) + pack_frame(SLICE, 1, _CUT[160:])),
        (255, pack_frame(WANT, 2, struct.pack("<2I", 0, 1)) + pack_frame(ACK, 2, ACKED.pack(0, 1))
            + pack_frame(END, 2, _END)),
        (255, pack_frame(PLACES, 1, _NOWHERE) + pack_frame(END, 1, _END)),
        (255, pack_frame(GOAWAY, 0) + pack_frame(END, 1, encode(Ended("busy", 1, bytes(16))))),
    )
)  # fmt: skip


def target(data: bytes) -> None:
    source = Source(data)
    piece, frames = source.byte(), source.rest()
    here = nodes()
    run(_ask(frames, 1 << 20 if piece == 255 else 1 + piece))
    here.check()
    here.reset()


async def _ask(frames: bytes, piece: int) -> None:
    here, loop = nodes(), asyncio.get_running_loop()
    channel = ClientChannel(
        FedStream(frames, piece=piece), rings=FixedRings(READER), wire=2, patience_s=10.0,
        retired=lambda channel: None, ended=lambda channel: None,
    )  # fmt: skip
    get = GetCall(here.far.store, here.addresses, answered=loop.create_future())
    put = PutCall(here.near.store, here.names[:HELD], answered=loop.create_future())
    for call in (get, put):
        names = here.names if call is get else here.names[:HELD]
        channel.ask(call, encode(Request(here.far.store.format_id, 1, bytes(16), 1000, b"".join(names))))
    await channel.closed()
    for call in (get, put):
        assert call.answered.done()
        if not call.answered.cancelled() and (trouble := call.answered.exception()) is not None:
            assert isinstance(trouble, PeerTrouble)
            plain(trouble)
    for arrived, address in zip(get.arrived, here.addresses, strict=True):
        assert not arrived or not here.far.store.missing([address.hash]), "it said so, and it is not here"
    if get.places is not None:
        _copy(get.places)


def _copy(places: Places) -> None:
    """As BulkClient does, from the files that the peer names."""
    here, arenas = nodes(), PeerArenas()
    opened = [arenas.open(file) for file in places.files]
    for address, file, offset in zip(here.addresses, places.file_of, places.offsets, strict=True):
        arena = opened[file] if file >= 0 else None
        shard = arena.shard(offset, HEADER_NBYTES + here.far.store.payload_nbytes) if arena else None
        if shard is not None:
            bring(here.far.store, address, shard)
    arenas.close()
