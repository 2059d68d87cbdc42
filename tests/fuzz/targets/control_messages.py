"""Every request and reply of the control service, and what is packed in them: MessageError, or it holds."""

import numpy as np

from cachemgr.cluster.control.messages import METHODS, HelloRequest, PullRequest, RingRequest, encode_message
from cachemgr.cluster.control.packed import (
    ADDRESS_NBYTES,
    MessageError,
    pack_addresses,
    pack_arcs,
    pack_names,
    unpack_addresses,
    unpack_arcs,
    unpack_names,
)
from tests.fuzz.blocks import nodes
from tests.fuzz.contract import plain
from tests.fuzz.source import Source

_KINDS = [(method, side) for _, method in sorted(METHODS.items()) for side in ("request", "reply")]
_FIRST_PACKED = len(_KINDS)
_ARCS = np.array([1, 5, 9], np.uint64)
_HEAD = {"wire": 2, "node": "node-1", "cluster": "c", "epoch": 3}


def _at(kind: int, body: bytes) -> bytes:
    return bytes([kind]) + body


EXAMPLES = (
    *(_at(at, encode_message(getattr(method, side)())) for at, (method, side) in enumerate(_KINDS)),
    *(_at(at, encode_message(method.request(**_HEAD))) for at, (method, _) in enumerate(_KINDS)),
    _at(2, encode_message(HelloRequest(**_HEAD, wire_min=1, wire_max=2))),
    _at(8, encode_message(PullRequest(**_HEAD, low=pack_arcs(_ARCS), high=pack_arcs(_ARCS)))),
    _at(10, encode_message(RingRequest(**_HEAD, state=b"{}"))),
    _at(_FIRST_PACKED, pack_names(nodes().names)),
    _at(_FIRST_PACKED + 1, pack_addresses([*nodes().addresses, None])),
    _at(_FIRST_PACKED + 2, pack_arcs(_ARCS) * 2),
    _at(_FIRST_PACKED + 2, pack_arcs(np.array([1, 4], np.uint64)) + pack_arcs(np.array([5, 9], np.uint64))),
    _at(1, b"\x81" * 20_000),
    _at(1, b"\x81\xdb\xff\xff\xff\xff"),
    _at(13, b"\x81\xa6status\xdf\xff\xff\xff\xff"),
)


def target(data: bytes) -> None:
    source = Source(data)
    kind, body = source.byte() % (_FIRST_PACKED + 3), source.rest()
    try:
        if kind < _FIRST_PACKED:
            method, side = _KINDS[kind]
            decode = getattr(method, f"decode_{side}")
            message = decode(body)
            again = encode_message(message)
            assert encode_message(decode(again)) == again
        elif kind == _FIRST_PACKED:
            assert pack_names(unpack_names(body)) == body
        elif kind == _FIRST_PACKED + 1:
            addresses = unpack_addresses(body)
            assert len(addresses) * ADDRESS_NBYTES == len(body)
            assert unpack_addresses(pack_addresses(addresses)) == addresses
        else:
            half = len(body) // 2
            low, high = unpack_arcs(body[:half], body[half:])
            assert pack_arcs(low) + pack_arcs(high) == body
            assert all(int(high[at]) < int(low[at + 1]) for at in range(len(low) - 1))
    except MessageError as error:
        plain(error)
