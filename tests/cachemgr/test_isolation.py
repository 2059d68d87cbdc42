"""Who shares a block with whom: a namespace with itself, all what is public, and nobody anything else."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import engines.build
from cachemgr.block_hash import BlockHasher
from cachemgr.contract import BlockFormat, BlockHash
from cachemgr.shard import Verdict, format_id
from engines.build import BuildOptions, build_release, kv_identity
from engines.manifest import parse_manifest
from tests.cachemgr.host import FORMAT, Host, fill, read
from tests.cachemgr.node import Node, open_node
from tests.engines.random_decoder import random_decoder

SECRET = bytes(range(32))
PROMPT = np.arange(24)


@dataclasses.dataclass(frozen=True)
class Asked:
    """All that the names of a prompt follow from."""

    tokens: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    namespace: str = "org"
    salt: str = ""
    adapter: str = ""
    kv_identity: bytes = b"0123456789abcdef"
    rank: int = 0
    ranks: int = 1
    block_tokens: int = 4
    public: int = 0

    def names(self) -> list[BlockHash]:
        block_format = BlockFormat(self.kv_identity, "float32", 2, 1, 4, self.block_tokens)
        made = BlockHasher(block_format, SECRET, adapter=self.adapter, rank=self.rank, ranks=self.ranks)
        return made.hashes(
            np.array(self.tokens, np.int64), namespace=self.namespace, salt=self.salt, public=self.public
        )

    def meaning(self, index: int) -> tuple[object, ...]:
        """What block `index` stands for: equal if and only if two askers may share it."""
        own = max(0, index + 1 - self.public)  # how many blocks of it, the last ones, are private
        blocks = index + 1 - own
        return (
            self.tokens[: self.block_tokens * (index + 1)], self.block_tokens, self.adapter,
            self.kv_identity, f"{self.rank}/{self.ranks}",
            blocks, (self.namespace, self.salt) if own else None,
        )  # fmt: skip

    def blocks(self) -> int:
        return len(self.tokens) // self.block_tokens


texts = st.text(st.sampled_from("a1/\x00é"), max_size=3)


@st.composite
def askers(draw: Callable[..., Any]) -> Asked:
    """From so few values that two are often equal in all but one field."""
    public = draw(st.integers(0, 2))
    rank, ranks = draw(st.sampled_from([(0, 1), (0, 2), (1, 2), (1, 12), (11, 2), (1, 1)]))
    return Asked(
        tokens=tuple(draw(st.lists(st.integers(0, 1), min_size=4, max_size=13))),
        namespace=draw(texts),
        salt="" if public else draw(texts),
        adapter=draw(texts),
        kv_identity=draw(st.sampled_from([b"0123456789abcdef", b"0123456789abcde", b"0123456789abcdefa"])),
        rank=rank,
        ranks=ranks,
        block_tokens=draw(st.sampled_from([2, 4])),
        public=public,
    )


def agree(one: Asked, other: Asked) -> None:
    """Names are equal exactly where everything that they follow from is."""
    ours, theirs = one.names(), other.names()
    for at, name in enumerate(ours):
        for index, their_name in enumerate(theirs):
            assert (name == their_name) == (one.meaning(at) == other.meaning(index)), (at, index)


@settings(max_examples=400)
@given(askers(), askers())
@example(Asked(namespace="org_1", salt="2345"), Asked(namespace="org_12345", salt=""))
@example(Asked(public=1), Asked(public=1, namespace="other"))
@example(Asked(public=1), Asked(public=2))
@example(Asked(), Asked(public=1))
def test_names_are_equal_if_and_only_if_all_that_they_follow_from_is(one: Asked, other: Asked) -> None:
    agree(one, other)


@settings(max_examples=200)
@given(askers(), st.sampled_from([field.name for field in dataclasses.fields(Asked)]), askers())
def test_one_other_field_is_enough_for_other_names(one: Asked, field: str, source: Asked) -> None:
    other = dataclasses.replace(one, **{field: getattr(source, field)})
    if not (other.public and other.salt):
        agree(one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"namespace": "org_1", "salt": "2345"}, {"namespace": "org_12345", "salt": ""}),
        ({"namespace": "", "salt": "org"}, {"namespace": "org", "salt": ""}),
        ({"kv_identity": b"0123456789abcdef", "adapter": "x"}, {"kv_identity": b"0123456789abcdefx"}),
        ({"adapter": "a0", "rank": 1, "ranks": 2}, {"adapter": "a", "rank": 1, "ranks": 2}),
        ({"adapter": "0/1"}, {"adapter": "0"}),
        ({"rank": 1, "ranks": 12}, {"rank": 11, "ranks": 2}),
        ({"ranks": 12}, {"ranks": 1, "salt": "2"}),
        ({"adapter": "x"}, {"salt": "x"}),
        ({"adapter": "x"}, {"namespace": "x"}),
        ({"salt": "\x01\x00\x00\x00"}, {"tokens": (1, 1, 2, 3, 4, 5, 6, 7)}),
        ({"block_tokens": 4}, {"block_tokens": 8}),
        ({"block_tokens": 4}, {"block_tokens": 2}),
        ({"tokens": (1, 2, 3, 4, 5, 6, 7, 8)}, {"tokens": (5, 6, 7, 8, 1, 2, 3, 4)}),
        ({"tokens": (1, 0, 0, 0)}, {"tokens": (256, 0, 0, 0)}),
    ],
    ids=str,
)
def test_a_border_that_moves_between_two_fields_changes_every_name(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    agree(Asked(**one), Asked(**other))
    assert not set(Asked(**one).names()) & set(Asked(**other).names())


def test_the_same_prompt_hits_in_one_namespace_and_never_in_another(host: Host) -> None:
    cache = host.open()
    mine = cache.hashes(PROMPT, namespace="org_1")
    assert fill(cache, mine) == 6
    again = cache.hashes(PROMPT, namespace="org_1")
    assert (cache.lookup(again), read(cache, again)) == (6, 6)
    for namespace, salt in (("org_2", ""), ("", ""), ("org_1", "salt"), ("org_", "1")):
        theirs = cache.hashes(PROMPT, namespace=namespace, salt=salt)
        assert (cache.lookup(theirs), read(cache, theirs)) == (0, 0)
        assert not set(theirs) & set(mine)


def test_a_public_prefix_is_computed_once_for_all_and_what_follows_for_each(host: Host) -> None:
    cache = host.open()
    cache.set_public([PROMPT[:14]])  # three whole blocks; two tokens more are nobody's

    def names(namespace: str, prompt: np.ndarray = PROMPT, salt: str = "") -> list[BlockHash]:
        public = cache.public_blocks(prompt, salt=salt)
        return cache.hashes(prompt, namespace=namespace, salt=salt, public=public)

    assert fill(cache, names("org_1")) == 6
    assert read(cache, names("org_2")) == 3
    assert fill(cache, names("org_2")) == 3, "only what is not public is computed again"
    assert read(cache, names("org_2", salt="apart")) == 0
    assert read(cache, names("org_3", PROMPT[::-1].copy())) == 0
    cache.set_public([])
    assert read(cache, names("org_2")) == read(cache, names("org_1")) == 0, "private again, for both"


def test_what_the_builder_puts_into_an_identity_keeps_names_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real releases that differ in block size or precision, and any other field of the identity."""
    seen: list[Mapping[str, str]] = []

    def noted(fields: Mapping[str, str]) -> bytes:
        seen.append(dict(fields))
        return kv_identity(fields)

    monkeypatch.setattr(engines.build, "kv_identity", noted)
    names: dict[str, list[BlockHash]] = {}
    for title, changes in {
        "small": {"block_tokens": 8},
        "large": {"block_tokens": 16},
        "fp32": {"block_tokens": 8, "precision": "fp32"},
    }.items():
        options = BuildOptions(lanes=1, max_seq_len=64, max_prefill_tokens=16, **changes)  # type: ignore[arg-type]
        folder = build_release(random_decoder(), tmp_path, model="m", release=1, options=options)
        manifest = parse_manifest((folder / "engine.json").read_bytes())
        asked = Asked(tuple(range(32)), kv_identity=bytes.fromhex(manifest.kv_identity))
        names[title] = dataclasses.replace(asked, block_tokens=manifest.block_tokens).names()
    for one, other in itertools.combinations(names.values(), 2):
        assert not set(one) & set(other)
    built = seen[0]
    assert {"kv_dtype", "block_tokens", "weights", "tokenizer"} <= built.keys()
    changed = [{**built, field: value} for field in built for value in ("", "bfloat16", built[field] + "0")]
    identities = {kv_identity(fields) for fields in [built, *changed]}
    assert len(identities) == 1 + len(changed)


LOOKALIKES = {
    "dtype": BlockFormat(FORMAT.kv_identity, "float16", 2, 1, 4, block_tokens=4),
    "dtype of the same size": BlockFormat(FORMAT.kv_identity, "bfloat16", 2, 1, 4, block_tokens=4),
    "block size": BlockFormat(FORMAT.kv_identity, "float16", 2, 1, 2, block_tokens=8),
    "layers for heads": BlockFormat(FORMAT.kv_identity, "float16", 1, 2, 4, block_tokens=4),
}


@pytest.mark.parametrize(("one", "other"), list(itertools.permutations(LOOKALIKES, 2)), ids=str)
def test_formats_that_claim_one_identity_do_not_exchange_blocks(host: Host, one: str, other: str) -> None:
    """Should an identity ever be claimed by another geometry: names may be equal, and no block is taken."""
    near = open_node(host, "near", block_format=LOOKALIKES[one])
    far = open_node(host, "far", block_format=LOOKALIKES[other])
    names = near.cache.hashes(PROMPT, namespace="org")
    commit_all(near, names)
    assert format_id(LOOKALIKES[one]) != format_id(LOOKALIKES[other])
    assert near.store.format_id != far.store.format_id
    held = near.hold_one(names[0])
    assert near.store.check(held.header, held.address) is not Verdict.CORRUPT
    assert far.store.check(held.header, held.address) is Verdict.CORRUPT
    near.store.let_go([held])


@pytest.mark.parametrize("other", ["dtype of the same size", "block size", "layers for heads"])
def test_a_process_of_another_format_finds_nothing_in_the_arenas_of_the_node(host: Host, other: str) -> None:
    ours = open_node(host, "node", block_format=LOOKALIKES["dtype"])
    names = ours.cache.hashes(PROMPT, namespace="org")
    commit_all(ours, names)
    ours.cache.close()
    theirs = open_node(host, "node", block_format=LOOKALIKES[other])
    theirs.cache._refresh_arenas()
    assert theirs.cache.lookup(names) == 0


def commit_all(node: Node, names: list[BlockHash]) -> None:
    for index in range(len(names)):
        pending = node.cache.prepare(names, index)
        assert pending is not None
        pending.payload[:] = index
        node.cache.commit(pending)
