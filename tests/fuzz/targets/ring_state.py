"""A ring as peers, Redis and ring.json have it: refused, or it is canonical and can be built."""

import msgspec

from cachemgr.ring import NodeSpec, Ring, RingError, RingState, decode_ring, encode_ring, first_state
from cachemgr.ring.ring_file import KeptRings, ReplacedRing, RingFile
from tests.fuzz.contract import plain, scratch
from tests.fuzz.source import Source

_STATE = first_state([NodeSpec("a", "host:1"), NodeSpec("b", "[::1]:2", "zone", 0.5)], replicas=1)
_MOVED = RingState(7, _STATE.nodes, {"a#3": "b"}, 1)
_KEPT = msgspec.json.encode(KeptRings(_MOVED, (ReplacedRing(_STATE, 5.0),), 6.0, True))
_MOST_NODES = 8  # owner tables of larger rings take a while, as they should
EXAMPLES = (
    b"\x00" + encode_ring(_STATE).replace(b'"epoch":1', b'"epoch": 1'),
    b"\x00" + encode_ring(_STATE), b"\x00" + encode_ring(_MOVED), b"\x01" + _KEPT,
    b"\x00" + b"[" * 20_000, b"\x01" + b'{"current":' * 5_000, b"\x01" + b'{"\x1b[31m": 1}',
    b"\x00" + encode_ring(_MOVED).replace(b'"a#3"', b'"a#' + b"9" * 400 + b'"'),
)  # fmt: skip


def target(data: bytes) -> None:
    source = Source(data)
    kind, body = source.byte() & 1, source.rest()
    try:
        if kind:
            path = scratch() / "ring.json"
            path.write_bytes(body)
            kept = RingFile(path).load()
            if kept is not None:
                _buildable(kept.current)
                RingFile(path).save(kept)
                assert RingFile(path).load() == kept
            return
        state = decode_ring(body)
    except RingError as error:
        plain(error)
        return
    assert encode_ring(state) == body
    _buildable(state)


def _buildable(state: RingState) -> None:
    if len(state.nodes) > _MOST_NODES or sum(node.vnodes for node in state.nodes) > 4096:
        return
    owners = Ring(state).owners(1 << 63, 3)
    assert 1 <= len(set(owners)) == len(owners) <= 3
