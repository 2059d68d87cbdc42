"""A header and a payload, from anywhere: use, leave alone or remove, and never another block's bytes."""

import numpy as np

from cachemgr.shard import (
    HEADER_DTYPE,
    HEADER_NBYTES,
    SEGMENT_BLOCKS,
    ShardCheck,
    Verdict,
    address_in,
)
from tests.cachemgr.host import payload_of
from tests.fuzz.blocks import HELD, nodes

_OPENER = nodes().near.cache._opener
EXAMPLES = (*(nodes().shard(index) for index in range(HELD)), nodes().shard(0)[:HEADER_NBYTES])


def target(data: bytes) -> None:
    header, payload = data[:HEADER_NBYTES], data[HEADER_NBYTES:]
    address = address_in(header)
    if address is None:
        assert len(header) < HEADER_NBYTES or header[8:12] != b"TCKV"
        return
    many = np.frombuffer(header * 3, HEADER_DTYPE)
    readable, strange = _OPENER.readable(many), _OPENER.unreadable(many)
    assert not (readable & strange).any()
    assert _OPENER.published(many).all()
    verdicts = []
    for wanted in (address, *nodes().addresses[:2]):
        judged = _OPENER.begin(header, wanted)
        if isinstance(judged, ShardCheck):
            assert wanted == address
            assert readable.all()
            judged.update(payload)
            if judged.passed():
                assert payload == payload_of(address.hash).tobytes(), "a tag over other bytes"
                assert address.index // SEGMENT_BLOCKS == 0
        verdicts.append(judged)
    if strange.any():
        assert Verdict.WHOLE not in verdicts
        assert not any(isinstance(judged, ShardCheck) for judged in verdicts)
