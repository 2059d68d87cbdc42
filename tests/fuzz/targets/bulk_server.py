"""A peer that says anything to a bulk server: refused, or served; no block lost, foreign or left pinned."""

import asyncio
import struct

from cachemgr.cluster.bulk.frames import (
    BLOCK,
    BLOCK_META,
    CORRUPT,
    COUNT,
    GET,
    LEASE,
    PUT,
    RING,
    SLICE,
    MalformedFrame,
    pack_frame,
)
from cachemgr.cluster.bulk.messages import Request, encode
from cachemgr.cluster.bulk.send_budget import SendBudget
from cachemgr.cluster.bulk.server_connection import ServerConnection, Serving
from cachemgr.cluster.bulk.streams import StreamEnded
from cachemgr.cluster.bulk.transfer_leases import TransferLeases
from cachemgr.ring import NodeSpec, encode_ring, first_state
from tests.cachemgr.cluster.bulk.pair import OWNER, READER, FixedRings, settings
from tests.fuzz.blocks import HELD, more_shards, nodes
from tests.fuzz.contract import plain
from tests.fuzz.loop import FedStream, run
from tests.fuzz.source import Source

_ID = nodes().near.store.format_id
_NAMES = nodes().names


def _request(names: list[bytes], *, in_place: bool = False) -> bytes:
    return encode(Request(_ID, 1, bytes(16), 1000, b"".join(names), in_place))


def _block(number: int, index: int, shard: bytes) -> bytes:
    return pack_frame(BLOCK, number, BLOCK_META.pack(index) + shard)


_PUT = pack_frame(PUT, 1, _request([*_NAMES]))
_BLOCKS = [_block(1, HELD + at, shard) for at, shard in enumerate(more_shards())]
_CUT = more_shards()[0]
EXAMPLES = tuple(
    bytes([piece]) + frames
    for piece, frames in (
        (255, pack_frame(GET, 1, _request([*_NAMES]))),
        (7, pack_frame(GET, 1, _request([*_NAMES], in_place=True)) + pack_frame(LEASE, 1, COUNT.pack(8))),
        (255, _PUT + b"".join(_BLOCKS)),
        (3, _PUT + _BLOCKS[0]),
        (255, _PUT + _block(1, HELD, _CUT[:200]) + pack_frame(SLICE, 1, _CUT[200:]) + _BLOCKS[1]),
        (255, _PUT + pack_frame(5, 1, struct.pack("<II", HELD, 3))),
        (255, _PUT + _BLOCKS[0] + pack_frame(7, 1) + _BLOCKS[1]),
        (255, pack_frame(CORRUPT, 0, _ID + _NAMES[0])),
        (255, pack_frame(RING, 0, encode_ring(first_state([NodeSpec("a", "h:1")], replicas=0)))),
    )
)


def target(data: bytes) -> None:
    source = Source(data)
    piece, frames = source.byte(), source.rest()
    here = nodes()
    run(_serve(frames, 1 << 20 if piece == 255 else 1 + piece))
    here.check()
    here.reset()


async def _serve(frames: bytes, piece: int) -> None:
    loop = asyncio.get_running_loop()
    budget = SendBudget(1 << 20, waiters=4, loop=loop)
    serving = Serving(
        stores={_ID: nodes().near.store}.get, rings=FixedRings(OWNER), settings=settings(same_host=True),
        budget=budget, leases=TransferLeases(10.0, loop=loop), on_read=lambda *read: None,
        hot_of=lambda segment: 1,
    )  # fmt: skip
    connection = ServerConnection(FedStream(frames, piece=piece), node=READER, wire=2, serving=serving)
    try:
        await connection.run()
    except StreamEnded:
        pass
    except MalformedFrame as error:
        plain(error)
    assert budget.used == 0
    assert len(serving.leases) == 0
    serving.leases.close()
