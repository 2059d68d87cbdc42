"""Shards: the vector file, round trips, and that no flipped bit, foreign key or nonce gets through."""

import hmac
import json
import os
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st

from cachemgr.contract import BlockFormat, BlockHash
from cachemgr.secrets import CacheSecrets
from cachemgr.shard import (
    HEADER_DTYPE,
    HEADER_NBYTES,
    SEGMENT_BLOCKS,
    BlockAddress,
    ShardCheck,
    ShardOpener,
    ShardSealer,
    Verdict,
    address_of,
    geometry_fields,
    slot_nbytes,
)

VECTOR = json.loads((Path(__file__).parent / "vectors" / "shard.json").read_text())
FORMAT = BlockFormat(b"0123456789abcdef", "float32", 1, 1, 2, block_tokens=4)
SECRETS = CacheSecrets(bytes(32), {1: bytes(range(32)), 7: bytes(range(32, 64))})
SESSION = bytes(range(100, 116))
HASHES = [BlockHash(bytes([row + 1]) * 16) for row in range(40)]
PAYLOAD = np.arange(FORMAT.payload_nbytes, dtype=np.uint8)
OPENER = ShardOpener(FORMAT, SECRETS.tags)


def sealed(index: int = 17, *, payload: np.ndarray = PAYLOAD, secrets: CacheSecrets = SECRETS) -> np.ndarray:
    header = ShardSealer(FORMAT, secrets.tags, session=SESSION).seal(address_of(HASHES, index), payload)
    return np.concatenate([np.frombuffer(header, np.uint8), payload])


def judge(shard: np.ndarray, address: BlockAddress, opener: ShardOpener = OPENER) -> Verdict:
    """What a whole shard is found to be, its payload fed in pieces (padding may follow)."""
    check = opener.begin(shard[:HEADER_NBYTES].tobytes(), address)
    if isinstance(check, Verdict):
        return check
    end = HEADER_NBYTES + int(shard[:4].view("<u4")[0])
    for start in range(HEADER_NBYTES, end, 24):
        check.update(shard[start : min(start + 24, end)].data)
    return Verdict.WHOLE if check.passed() else Verdict.CORRUPT


def put(shard: np.ndarray, offset: int, data: bytes) -> np.ndarray:
    changed = shard.copy()
    changed[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
    return changed


def test_vector_never_changes() -> None:
    secrets = CacheSecrets(bytes(32), {VECTOR["key_id"]: bytes.fromhex(VECTOR["tag_secret"])})
    block_format = BlockFormat(bytes.fromhex(VECTOR["kv_identity"]), VECTOR["dtype"], **VECTOR["geometry"])
    hashes = [BlockHash(bytes.fromhex(name)) for name in VECTOR["hashes"]]
    payload = np.frombuffer(bytes.fromhex(VECTOR["payload"]), np.uint8)
    address = address_of(hashes, VECTOR["index"])
    header = ShardSealer(block_format, secrets.tags, session=bytes.fromhex(VECTOR["session"])).seal(
        address, payload
    )
    assert header.hex() == VECTOR["header"]
    shard = np.frombuffer(bytes.fromhex(VECTOR["header"]) + payload.tobytes(), np.uint8)
    assert judge(shard, address, ShardOpener(block_format, secrets.tags)) is Verdict.WHOLE


def test_the_tag_is_plain_aes_256_gmac() -> None:
    header, payload = sealed()[:HEADER_NBYTES].tobytes(), PAYLOAD.tobytes()
    info = b"\x01" + (16).to_bytes(4, "little") + SESSION
    extracted = hmac.digest(b"tensorcache/shard-tag/1", SECRETS.tags[7], "sha256")
    key = hmac.digest(extracted, info + b"\x01", "sha256")
    nonce = bytes(4) + (1).to_bytes(8, "little")
    assert AESGCM(key).encrypt(nonce, b"", header[:112] + payload) == header[112:]


def test_vectorised_layout_equals_the_packed_one() -> None:
    row = sealed(17)[:HEADER_NBYTES].view(HEADER_DTYPE)[0]
    assert row["length"] == FORMAT.payload_nbytes
    assert row["align"] == 128
    assert bytes(row["magic"]) == b"TCKV"
    assert (row["version"], row["dtype"], row["rank"], row["ranks"], row["layers"]) == (1, 1, 0, 1, 1)
    assert (row["zero"], row["heads"], row["head_dim"], row["tokens"], row["index"]) == (0, 1, 2, 4, 17)
    assert (row["key_id"], row["sequence"]) == (7, 1)
    assert bytes(row["hash"]) == HASHES[17]
    assert bytes(row["parent"]) == HASHES[16]
    assert bytes(row["segment"]) == HASHES[16]
    assert bytes(row["identity"]) == FORMAT.kv_identity[:8]
    assert bytes(row["session"]) == SESSION


def test_addresses() -> None:
    first = address_of(HASHES, 0)
    assert (first.parent, first.segment, first.index) == (bytes(16), HASHES[0], 0)
    assert address_of(HASHES, SEGMENT_BLOCKS - 1).segment == HASHES[0]
    assert address_of(HASHES, SEGMENT_BLOCKS).segment == HASHES[SEGMENT_BLOCKS]


@given(st.binary(min_size=FORMAT.payload_nbytes, max_size=FORMAT.payload_nbytes), st.integers(0, 39))
def test_round_trip(payload: bytes, index: int) -> None:
    shard = sealed(index, payload=np.frombuffer(payload, np.uint8))
    assert judge(shard, address_of(HASHES, index)) is Verdict.WHOLE
    padded = np.concatenate([shard, np.zeros(64, np.uint8)])
    assert judge(padded, address_of(HASHES, index)) is Verdict.WHOLE


def test_every_flipped_bit_is_refused() -> None:
    shard, address = sealed(), address_of(HASHES, 17)
    for bit in range(8 * len(shard)):
        shard[bit // 8] ^= 1 << bit % 8
        assert judge(shard, address) is not Verdict.WHOLE, f"bit {bit}"
        shard[bit // 8] ^= 1 << bit % 8
    assert judge(shard, address) is Verdict.WHOLE


@given(st.binary(max_size=300), st.integers(0, 200))
def test_any_overwritten_bytes_are_refused(data: bytes, offset: int) -> None:
    shard = sealed()
    changed = put(shard, offset, data[: max(0, len(shard) - offset)])
    verdict = judge(changed, address_of(HASHES, 17))
    assert (verdict is Verdict.WHOLE) == (changed.tobytes() == shard.tobytes())


@given(st.integers(HEADER_NBYTES, HEADER_NBYTES + FORMAT.payload_nbytes - 1))
def test_a_truncated_payload_is_refused(length: int) -> None:
    assert judge(sealed()[:length], address_of(HASHES, 17)) is Verdict.CORRUPT


def test_verdicts() -> None:
    shard, address = sealed(), address_of(HASHES, 17)
    unknown_key = sealed(secrets=CacheSecrets(bytes(32), {9: bytes(32)}))
    other_secret = sealed(secrets=CacheSecrets(bytes(32), {7: bytes(32)}))
    cases = {
        "version": (put(shard, 12, b"\x02"), Verdict.UNREADABLE),
        "key id": (unknown_key, Verdict.UNREADABLE),
        "key": (other_secret, Verdict.CORRUPT),
        "magic": (put(shard, 8, b"TCKW"), Verdict.CORRUPT),
        "identity": (put(shard, 80, bytes(8)), Verdict.CORRUPT),
        "identity under an unknown key": (put(unknown_key, 80, bytes(8)), Verdict.CORRUPT),
        "session": (put(shard, 96, bytes(16)), Verdict.CORRUPT),
        "reserved": (put(shard, 17, b"\x01"), Verdict.CORRUPT),
    }
    for name, (changed, verdict) in cases.items():
        assert judge(changed, address) is verdict, name
    for place in (16, 18):
        assert judge(shard, address_of(HASHES, place)) is Verdict.CORRUPT, "another place in the chain"


def test_old_key_ids_stay_readable_and_the_highest_seals() -> None:
    old = sealed(secrets=CacheSecrets(bytes(32), {1: SECRETS.tags[1]}))
    assert judge(old, address_of(HASHES, 17)) is Verdict.WHOLE
    assert sealed()[:HEADER_NBYTES].view(HEADER_DTYPE)[0]["key_id"] == 7


def test_the_tag_may_be_fed_in_pieces_of_any_size() -> None:
    for size in (1, 7, 16, 33):
        shard = sealed()
        check = OPENER.begin(shard[:HEADER_NBYTES].tobytes(), address_of(HASHES, 17))
        assert isinstance(check, ShardCheck)
        for start in range(HEADER_NBYTES, len(shard), size):
            check.update(shard[start : start + size].data)
        assert check.passed()


def test_nonces_never_repeat_and_sessions_differ() -> None:
    sealer, other = ShardSealer(FORMAT, SECRETS.tags), ShardSealer(FORMAT, SECRETS.tags)
    rows = [one.seal(address_of(HASHES, 0), PAYLOAD) for one in (sealer, other) for _ in range(500)]
    headers = np.frombuffer(b"".join(rows), HEADER_DTYPE)
    assert len({(bytes(row["session"]), int(row["sequence"])) for row in headers}) == 1000
    assert len({bytes(row["session"]) for row in headers}) == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # newer Pythons warn of fork beside threads
def test_a_forked_process_may_not_seal() -> None:
    sealer = ShardSealer(FORMAT, SECRETS.tags)
    child = os.fork()
    if child == 0:
        try:
            sealer.seal(address_of(HASHES, 0), PAYLOAD)
        except RuntimeError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, HEADER_NBYTES - 1), st.integers(0, 255)), max_size=3))
def test_the_vectorised_judgement_agrees_with_the_careful_one(changes: list[tuple[int, int]]) -> None:
    shard = sealed()
    for offset, value in changes:
        shard[offset] = value
    row = shard[:HEADER_NBYTES].view(HEADER_DTYPE)
    readable, unreadable = bool(OPENER.readable(row)[0]), bool(OPENER.unreadable(row)[0])
    verdict = judge(shard, address_of(HASHES, 17))
    assert not (readable and unreadable)
    assert readable or verdict is not Verdict.WHOLE
    assert not unreadable or verdict is not Verdict.WHOLE


@pytest.mark.parametrize(
    "changed",
    [{"dtype": "float64"}, {"layers": 256}, {"kv_heads": 0}, {"head_dim": 65536}, {"kv_identity": b"short"}],
)
def test_formats_that_do_not_fit_the_header_are_refused(changed: dict[str, object]) -> None:
    fields = {
        "kv_identity": FORMAT.kv_identity, "dtype": "float32", "layers": 1, "kv_heads": 1, "head_dim": 2,
        "block_tokens": 4, **changed,
    }  # fmt: skip
    with pytest.raises(ValueError, match=next(iter(changed)).split("_")[0] + "|format"):
        geometry_fields(BlockFormat(**fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(("payload", "slot"), [(1, 256), (128, 256), (129, 384), (1474560, 1474688)])
def test_slots_are_multiples_of_128(payload: int, slot: int) -> None:
    assert slot_nbytes(payload) == slot


def test_forged_sessions_do_not_grow_memory_without_bound() -> None:
    opener = ShardOpener(FORMAT, SECRETS.tags)
    for number in range(3000):
        forged = put(sealed(), 96, number.to_bytes(16, "little"))
        assert judge(forged, address_of(HASHES, 17), opener) is Verdict.CORRUPT
    assert len(opener._keys._sessions) <= 1024
