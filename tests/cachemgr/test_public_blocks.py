"""Public blocks: the vector file, what begins a registered prefix, and what stays private."""

import hmac
import json
from hashlib import blake2b, sha256
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachemgr import block_hash
from cachemgr.block_hash import BlockHasher
from cachemgr.contract import BlockFormat, BlockHash

VECTORS = json.loads((Path(__file__).parent / "vectors" / "public_block_hash.json").read_text())
SECRET = bytes(range(32))
FORMAT = BlockFormat(b"0123456789abcdef", "float32", 2, 1, 4, block_tokens=4)

few_tokens = st.lists(st.integers(0, 2), max_size=24)  # so few that prompts often begin alike
prefixes = st.lists(few_tokens, max_size=4)


def hasher(*registered: list[int], **others: object) -> BlockHasher:
    made = BlockHasher(FORMAT, SECRET, **others)  # type: ignore[arg-type]
    made.set_public([np.array(tokens, np.int64) for tokens in registered])
    return made


def named(
    made: BlockHasher, tokens: list[int], *, namespace: str = "org", salt: str = ""
) -> tuple[int, list[BlockHash]]:
    """As the backend does it: how many blocks are public, and all names."""
    prompt = np.array(tokens, np.int64)
    public = made.public_blocks(prompt, salt=salt)
    return public, made.hashes(prompt, namespace=namespace, salt=salt, public=public)


@pytest.mark.parametrize("vector", VECTORS["vectors"], ids=lambda vector: vector["name"])
def test_vectors_never_change(vector: dict[str, object]) -> None:
    made = BlockHasher(
        BlockFormat(bytes.fromhex(str(vector["kv_identity"])), "float32", 2, 1, 4, block_tokens=4),
        bytes.fromhex(VECTORS["naming_secret"]),
        adapter=str(vector["adapter"]),
        rank=int(str(vector["rank"])),
        ranks=int(str(vector["ranks"])),
    )
    tokens, public = np.array(vector["tokens"], np.int64), int(str(vector["public"]))
    got = made.hashes(tokens, namespace=str(vector["namespace"]), salt="", public=public)
    assert [name.hex() for name in got] == vector["hashes"]


def field(tag: int, data: bytes) -> bytes:
    return bytes([tag]) + len(data).to_bytes(4, "little") + data


def by_hand(tokens: list[int], namespace: str, public: int) -> list[bytes]:
    """The chain as its definition reads, sharing no code with the product."""
    extracted = hmac.digest(b"tensorcache/block-hash/1", SECRET, sha256)
    contexts = field(0x21, b""), field(0x20, namespace.encode("utf-8", "surrogatepass"))
    shared, own = (hmac.digest(extracted, context + b"\x01", sha256) for context in contexts)
    seed = field(1, b"tensorcache/1") + field(2, FORMAT.kv_identity) + field(3, b"") + field(4, b"0/1")
    root_key = shared if public else own
    parent, names = blake2b(seed + field(5, b""), digest_size=16, key=root_key).digest(), []
    for index in range(len(tokens) // 4):
        data = b"".join(token.to_bytes(4, "little") for token in tokens[4 * index : 4 * index + 4])
        key = shared if index < public else own
        parent = blake2b(field(0x10, parent) + field(0x11, data), digest_size=16, key=key).digest()
        names.append(parent)
    return names


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=21), st.text(st.characters(), max_size=8), st.integers(0, 7)
)
def test_equals_the_definition(tokens: list[int], namespace: str, public: int) -> None:
    got = hasher().hashes(np.array(tokens, np.int64), namespace=namespace, salt="", public=public)
    assert got == by_hand(tokens, namespace, public)


@given(prefixes, few_tokens)
def test_public_is_the_longest_run_of_whole_blocks_that_begins_a_registered_prefix(
    registered: list[list[int]], tokens: list[int]
) -> None:
    def begins(blocks: int) -> bool:
        whole = tokens[: 4 * blocks]
        return any(len(other) >= 4 * blocks and other[: 4 * blocks] == whole for other in registered)

    expected = max(blocks for blocks in range(len(tokens) // 4 + 1) if blocks == 0 or begins(blocks))
    made = hasher(*registered)
    assert made.public_blocks(np.array(tokens, np.int64), salt="") == expected
    assert made.public_blocks(np.array(tokens, np.int64), salt="pepper") == 0


@given(prefixes, few_tokens, few_tokens)
def test_two_tenants_share_what_is_public_and_nothing_behind_it(
    registered: list[list[int]], one: list[int], other: list[int]
) -> None:
    made = hasher(*registered)
    public, ours = named(made, one, namespace="a")
    theirs_public, theirs = named(made, other, namespace="b")
    common = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), 10**6)
    shared = min(public, theirs_public, common // 4)
    assert ours[:shared] == theirs[:shared]
    assert not set(ours[shared:]) & set(theirs[shared:])


def test_a_tenant_makes_nothing_public_by_himself() -> None:
    """Not by a prompt that is nearly a registered prefix, nor by any name of a namespace, nor by a salt."""
    registered = list(range(12))
    made = hasher(registered)
    public_names = set(made.hashes(np.arange(12), namespace="any", salt="", public=3))
    shifted, longer_block = [*range(1, 13)], [0, 1, 2, 2, *range(4, 12)]
    for tokens in (shifted, longer_block, [*range(4, 12)]):
        for namespace in ("org", "", "public", "!", "\x00", "\x21", "\x21\x00\x00\x00\x00"):
            public, got = named(made, tokens, namespace=namespace)
            assert public == 0
            assert not public_names & set(got)
    for namespace in ("", "\x21\x00\x00\x00\x00"):
        public, got = named(made, registered, namespace=namespace, salt="pepper")
        assert public == 0
        assert not public_names & set(got)
        assert not public_names & set(made.hashes(np.arange(12), namespace=namespace, salt=""))


def test_what_is_no_longer_registered_is_private_again() -> None:
    made = hasher(list(range(8)), list(range(100, 112)))
    public, before = named(made, list(range(8)))
    made.set_public([np.arange(100, 112)])
    private, after = named(made, list(range(8)))
    assert (public, private) == (2, 0)
    assert not set(before) & set(after)
    assert after == made.hashes(np.arange(8), namespace="org", salt="")
    assert named(made, list(range(100, 112)))[0] == 3
    made.set_public([])
    assert named(made, list(range(100, 112)))[0] == 0


def test_a_prefix_that_is_refused_changes_nothing() -> None:
    made = hasher(list(range(8)))
    for wrong in (np.array([-1, 0, 0, 0]), np.zeros((2, 4), np.int64), np.zeros(4)):
        with pytest.raises(ValueError, match="tokens"):
            made.set_public([np.arange(50, 58), wrong])
    assert named(made, list(range(8)))[0] == 2
    assert named(made, list(range(50, 58)))[0] == 0


@pytest.mark.parametrize(("public", "salt"), [(1, "pepper"), (-1, "")])
def test_a_salt_and_public_blocks_exclude_each_other(public: int, salt: str) -> None:
    """Two salts would share all names behind the public ones, as those do not depend on it."""
    with pytest.raises(ValueError, match="public: must be"):
        hasher().hashes(np.arange(8), namespace="org", salt=salt, public=public)


def test_without_a_registered_prefix_or_with_a_salt_nothing_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    empty, one = hasher(), hasher([1, 2, 3, 4])

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a hash was computed")

    monkeypatch.setattr(block_hash, "blake2b", refuse)
    assert empty.public_blocks(np.arange(8), salt="") == one.public_blocks(np.arange(8), salt="x") == 0
    with pytest.raises(AssertionError, match="computed"):
        one.public_blocks(np.arange(8), salt="")


def test_a_search_goes_no_further_than_the_longest_prefix_and_the_first_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = hasher(list(range(12)))
    made_names: list[bytes] = []
    names = BlockHasher._names

    def counted(*arguments: object, **keywords: object) -> object:
        for name in names(*arguments, **keywords):  # type: ignore[arg-type]
            made_names.append(name)
            yield name

    monkeypatch.setattr(BlockHasher, "_names", counted)
    assert made.public_blocks(np.arange(4000), salt="") == 3
    assert len(made_names) == 3
    made_names.clear()
    assert made.public_blocks(np.arange(7, 4000), salt="") == 0
    assert len(made_names) == 1
