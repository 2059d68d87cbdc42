"""Messages: bounded, tolerant of what they do not know; bad bytes are a MessageError and nothing else."""

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as options
from hypothesis import strategies as st

from cachemgr.cluster.control.messages import (
    HELLO,
    LOOKUP,
    METHODS,
    PULL,
    RING,
    STATUS,
    LookupRequest,
    NodeStatus,
    PullRequest,
    Reply,
    Request,
    StatusReply,
    common_wire,
    encode_message,
)
from cachemgr.cluster.control.packed import (
    ADDRESS_NBYTES,
    CURSOR_NBYTES,
    MAX_NAMES,
    MessageError,
    pack_address,
    pack_addresses,
    pack_arcs,
    pack_names,
    unpack_addresses,
    unpack_arcs,
    unpack_names,
)
from cachemgr.contract import BlockHash
from cachemgr.ring import Version
from cachemgr.shard import BlockAddress

patient = options(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A busy machine is not a wrong answer."""

names = st.binary(min_size=16, max_size=16).map(BlockHash)
addresses = st.builds(
    BlockAddress,
    hash=names.filter(any),
    parent=names,
    segment=names,
    index=st.integers(min_value=0, max_value=2**32 - 1),
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@patient
@given(st.lists(st.none() | addresses, max_size=20))
def test_addresses_survive_packing(some: list[BlockAddress | None]) -> None:
    assert unpack_addresses(pack_addresses(some)) == some


@patient
@given(st.lists(names, max_size=20))
def test_names_survive_packing(some: list[BlockHash]) -> None:
    assert unpack_names(pack_names(some)) == some


@patient
@given(st.lists(addresses, min_size=2, max_size=10))
def test_packed_addresses_sort_by_segment_then_index(some: list[BlockAddress]) -> None:
    packed = sorted(map(pack_address, some))
    in_order = sorted(some, key=lambda one: (one.segment, one.index, one.hash, one.parent))
    assert list(map(pack_address, in_order)) == packed
    assert all(len(one[:CURSOR_NBYTES]) == CURSOR_NBYTES for one in packed)


@patient
@given(st.binary(max_size=200))
def test_lengths_that_do_not_fit_are_refused(data: bytes) -> None:
    for unpack, nbytes in ((unpack_names, 16), (unpack_addresses, ADDRESS_NBYTES)):
        if len(data) % nbytes:
            with pytest.raises(MessageError, match=f"multiple of {nbytes} bytes"):
                unpack(data)
        else:
            assert len(unpack(data)) == len(data) // nbytes


def test_arcs_survive_packing() -> None:
    low = np.array([0, 100, 2**63], np.uint64)
    high = np.array([99, 100, 2**64 - 1], np.uint64)
    got_low, got_high = unpack_arcs(pack_arcs(low), pack_arcs(high))
    assert got_low.tolist() == low.tolist()
    assert got_high.tolist() == high.tolist()


@pytest.mark.parametrize(
    ("low", "high"),
    [([5], [4]), ([0, 5], [5, 9]), ([9, 0], [9, 1]), ([0, 2], [1])],
    ids=["wraps", "overlap", "unsorted", "uneven"],
)
def test_arcs_that_are_none_are_refused(low: list[int], high: list[int]) -> None:
    with pytest.raises(MessageError):
        unpack_arcs(pack_arcs(np.array(low, np.uint64)), pack_arcs(np.array(high, np.uint64)))


@patient
@given(data=st.binary(max_size=400))
def test_random_bytes_are_no_message(data: bytes) -> None:
    for method in METHODS.values():
        for decode in (method.decode_request, method.decode_reply):
            try:
                decode(data)
            except MessageError:
                continue


@patient
@given(value=anything)
def test_any_msgpack_is_a_message_or_refused(value: object) -> None:
    data = msgspec.msgpack.encode(value)
    for method in METHODS.values():
        for decode in (method.decode_request, method.decode_reply):
            try:
                decode(data)
            except MessageError:
                continue


@patient
@given(field=st.sampled_from(PullRequest.__struct_fields__), value=anything)
def test_any_value_in_any_field_is_taken_or_refused(field: str, value: object) -> None:
    data = msgspec.msgpack.encode({field: value})
    try:
        request = PULL.decode_request(data)
    except MessageError:
        return
    assert len(request.moved) <= 16 * MAX_NAMES


@pytest.mark.parametrize(
    ("method", "value"),
    [
        (LOOKUP, {"names": bytes(16 * (MAX_NAMES + 1))}),
        (LOOKUP, {"node": "Not An Id"}),
        (LOOKUP, {"node": "a\n"}),
        (LOOKUP, {"cluster": "c" * 65}),
        (LOOKUP, {"epoch": -1}),
        (LOOKUP, {"digest": b"short"}),
        (LOOKUP, {"format_id": bytes(17)}),
        (RING, {"state": bytes((4 << 20) + 1)}),
        (PULL, {"low": bytes((2 << 20) + 8)}),
        (PULL, {"after": bytes(65)}),
        (HELLO, {"wire_min": 1 << 40}),
        (HELLO, [1, 2, 3]),
    ],
)
def test_what_is_out_of_bounds_is_refused(method: object, value: object) -> None:
    with pytest.raises(MessageError):
        method.decode_request(msgspec.msgpack.encode(value))  # type: ignore[attr-defined]


def test_a_bomb_of_nested_lists_is_refused() -> None:
    with pytest.raises(MessageError):
        LOOKUP.decode_request(b"\x81\xa3new" + b"\x91" * 100_000 + b"\xc0")


def test_counts_in_replies_are_bounded() -> None:
    status = NodeStatus(trouble=["line"] * 65)
    with pytest.raises(MessageError):
        STATUS.decode_reply(encode_message(StatusReply(status=status)))


def test_fields_of_a_newer_release_are_skipped() -> None:
    data = msgspec.msgpack.encode({"wire": 3, "names": bytes(16), "what_is_this": {"a": [1, b"2"]}})
    request = LOOKUP.decode_request(data)
    assert (request.wire, request.names) == (3, bytes(16))


def test_fields_that_an_older_release_does_not_send_have_defaults() -> None:
    assert LOOKUP.decode_reply(msgspec.msgpack.encode({"epoch": 4})).version == Version(4, bytes(16))
    assert HELLO.decode_request(b"\x80").wire_max == 0


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_every_request_says_who_asks_and_every_reply_under_which_ring(method: object) -> None:
    assert issubclass(method.request, Request)  # type: ignore[attr-defined]
    assert issubclass(method.reply, Reply)  # type: ignore[attr-defined]
    request = method.request(wire=2, node="a", cluster="c", epoch=7, digest=b"d" * 16)  # type: ignore[attr-defined]
    again = method.decode_request(encode_message(request))  # type: ignore[attr-defined]
    assert (again.wire, again.node, again.cluster, again.version) == (2, "a", "c", Version(7, b"d" * 16))


@pytest.mark.parametrize(
    ("theirs", "ours", "common"),
    [
        ((1, 2), (1, 2), 2),
        ((1, 1), (1, 2), 1),
        ((2, 3), (1, 2), 2),
        ((3, 4), (1, 2), None),
        ((0, 0), (1, 2), None),
    ],
)
def test_the_highest_common_wire_version_is_spoken(
    theirs: tuple[int, int], ours: tuple[int, int], common: int | None
) -> None:
    assert common_wire(*theirs, ours=ours) == common
    assert common_wire(*ours, ours=theirs) == common


def test_a_lookup_of_the_most_names_is_small() -> None:
    data = encode_message(LookupRequest(names=bytes(16 * MAX_NAMES)))
    assert len(data) < 17 * MAX_NAMES
