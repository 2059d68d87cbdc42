"""Block hashes: the vector file, an independent computation, and what must never collide."""

import hmac
import json
from hashlib import blake2b, sha256
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachemgr.block_hash import BlockHasher
from cachemgr.contract import BlockFormat

VECTORS = json.loads((Path(__file__).parent / "vectors" / "block_hash.json").read_text())
SECRET = bytes(range(32))
FORMAT = BlockFormat(b"0123456789abcdef", "float32", 2, 1, 4, block_tokens=4)

tokens_of = st.lists(st.integers(0, 2**32 - 1), max_size=21)
names = st.text(st.characters(), max_size=8)  # lone surrogates included


def hasher(block_format: BlockFormat = FORMAT, **others: object) -> BlockHasher:
    return BlockHasher(block_format, SECRET, **others)  # type: ignore[arg-type]


def hashes(tokens: list[int], *, namespace: str = "org", salt: str = "", **others: object) -> list[bytes]:
    return list(
        hasher(**others).hashes(np.array(tokens, np.int64), namespace=namespace, salt=salt)  # type: ignore[arg-type]
    )


def field(tag: int, data: bytes) -> bytes:
    return bytes([tag]) + len(data).to_bytes(4, "little") + data


def hkdf(secret: bytes, salt: bytes, info: bytes) -> bytes:
    """RFC 5869 for one output block."""
    extracted = hmac.digest(salt, secret, sha256)
    return hmac.digest(extracted, info + b"\x01", sha256)


def by_hand(tokens: list[int], identity: bytes, namespace: str, salt: str, block_tokens: int) -> list[bytes]:
    """The chain as its definition reads, sharing no code with the product."""
    key = hkdf(SECRET, b"tensorcache/block-hash/1", field(0x20, namespace.encode("utf-8", "surrogatepass")))
    seed = field(1, b"tensorcache/1") + field(2, identity) + field(3, b"") + field(4, b"0/1")
    seed += field(5, salt.encode("utf-8", "surrogatepass"))
    parent, chain = blake2b(seed, digest_size=16, key=key).digest(), []
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        data = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + block_tokens])
        parent = blake2b(field(0x10, parent) + field(0x11, data), digest_size=16, key=key).digest()
        chain.append(parent)
    return chain


@pytest.mark.parametrize("vector", VECTORS["vectors"], ids=lambda vector: vector["name"])
def test_vectors_never_change(vector: dict[str, object]) -> None:
    block_format = BlockFormat(
        bytes.fromhex(str(vector["kv_identity"])), "float32", 2, 1, 4, int(str(vector["block_tokens"]))
    )
    made = BlockHasher(
        block_format,
        bytes.fromhex(VECTORS["naming_secret"]),
        adapter=str(vector["adapter"]),
        rank=int(str(vector["rank"])),
        ranks=int(str(vector["ranks"])),
    )
    tokens = np.array(vector["tokens"], np.int64)
    got = made.hashes(tokens, namespace=str(vector["namespace"]), salt=str(vector["salt"]))
    assert [name.hex() for name in got] == vector["hashes"]


@given(tokens_of, names, names)
def test_equals_the_definition(tokens: list[int], namespace: str, salt: str) -> None:
    assert hashes(tokens, namespace=namespace, salt=salt) == by_hand(
        tokens, FORMAT.kv_identity, namespace, salt, 4
    )


@given(tokens_of, st.integers(0, 20))
def test_a_prefix_keeps_its_names_and_a_change_renames_all_that_follow(tokens: list[int], at: int) -> None:
    whole = hashes(tokens)
    assert len(whole) == len(tokens) // 4
    assert hashes(tokens[:at]) == whole[: min(at, len(tokens)) // 4]
    if at < len(tokens):
        changed = [*tokens[:at], (tokens[at] + 1) % 2**32, *tokens[at + 1 :]]
        other = hashes(changed)
        assert other[: at // 4] == whole[: at // 4]
        assert not set(other[at // 4 :]) & set(whole)


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 8])
def test_only_whole_blocks_have_names(count: int) -> None:
    assert len(hashes(list(range(count)))) == count // 4


@given(names, names, names, names)
def test_namespace_and_salt_never_run_into_each_other(a: str, b: str, c: str, d: str) -> None:
    one, other = hashes([1, 2, 3, 4], namespace=a, salt=b), hashes([1, 2, 3, 4], namespace=c, salt=d)
    assert (one == other) == ((a, b) == (c, d))


def test_field_borders_are_part_of_the_name() -> None:
    spellings = [("org_1", "2345"), ("org_12345", ""), ("", "org_12345"), ("org_1\0", "2345")]
    spellings += [("\u00e9", ""), ("e\u0301", "")]  # one letter in two encodings is two namespaces
    made = {hashes([1, 2, 3, 4], namespace=namespace, salt=salt)[0] for namespace, salt in spellings}
    assert len(made) == len(spellings)


def test_identity_adapter_and_rank_are_part_of_the_name() -> None:
    other_identity = BlockFormat(b"0123456789abcdeF", "float32", 2, 1, 4, block_tokens=4)
    made = {
        hashes([1, 2, 3, 4])[0],
        hashes([1, 2, 3, 4], block_format=other_identity)[0],
        hashes([1, 2, 3, 4], adapter="lora")[0],
        hashes([1, 2, 3, 4], rank=0, ranks=2)[0],
        hashes([1, 2, 3, 4], rank=1, ranks=2)[0],
    }
    assert len(made) == 5


def test_the_integer_type_does_not_matter() -> None:
    values = np.arange(8)
    made = [
        hasher().hashes(values.astype(kind), namespace="org", salt="")
        for kind in (np.int32, np.int64, np.uint32)
    ]
    strided = hasher().hashes(np.repeat(values, 2)[::2], namespace="org", salt="")
    assert made[0] == made[1] == made[2] == strided


@pytest.mark.parametrize(
    "tokens", [np.array([-1, 0, 0, 0]), np.array([2**32, 0, 0, 0]), np.zeros((2, 4), np.int64), np.zeros(4)]
)
def test_tokens_that_would_wrap_around_are_refused(tokens: np.ndarray) -> None:
    with pytest.raises(ValueError, match="tokens"):
        hasher().hashes(tokens, namespace="org", salt="")
