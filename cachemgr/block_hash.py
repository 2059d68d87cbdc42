"""Names blocks: a keyed BLAKE2b-128 chain over tokens, the same on every node and in every process.

    h(-1) = H(domain, kv_identity, adapter, rank/ranks, salt)      h(i) = H(h(i-1), tokens(i) as u32 LE)

H is BLAKE2b-128 keyed with HKDF(naming secret, namespace) over tagged, length-prefixed fields. A caller
without the naming secret cannot compute a name, and equal prompts of two namespaces have nothing in common.

Public blocks have H keyed with HKDF(naming secret, public), a field that no namespace can spell, and no salt;
the first private block is H(last public name, tokens) under the key of its namespace. Only the names of
registered prefixes are kept: a prompt begins with one as far as its own public names are among them.

Invariant: a vector file with a test secret is checked in; a change that moves these bytes is a new domain
string. Threads: any; what is public changes as a whole.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from cachemgr.contract import BlockFormat, BlockHash
from cachemgr.keys import derive_key, encode_fields, encode_text

HASH_NBYTES = 16
_DOMAIN = b"tensorcache/1"
_PURPOSE = b"tensorcache/block-hash/1"

_TAG_DOMAIN, _TAG_IDENTITY, _TAG_ADAPTER, _TAG_RANK, _TAG_SALT = 0x01, 0x02, 0x03, 0x04, 0x05
_TAG_PARENT, _TAG_TOKENS = 0x10, 0x11
_TAG_NAMESPACE, _TAG_PUBLIC = 0x20, 0x21

_PARENT_PREFIX = bytes((_TAG_PARENT,)) + HASH_NBYTES.to_bytes(4, "little")
_FIELD_HEAD_NBYTES = 5
_U32_MAX = 2**32 - 1


@dataclass(frozen=True, slots=True)
class _Public:
    """What is public at one moment: the public names of all its blocks, and of how many the longest has."""

    names: frozenset[BlockHash] = frozenset()
    blocks: int = 0


class BlockHasher:
    """Hashes prompts for one block format; `adapter` and `rank`/`ranks` are part of every name."""

    def __init__(
        self,
        block_format: BlockFormat,
        naming_secret: bytes,
        *,
        adapter: str = "",
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self._block_tokens = block_format.block_tokens
        self._naming_secret = naming_secret
        self._seed_fields = (
            (_TAG_DOMAIN, _DOMAIN),
            (_TAG_IDENTITY, block_format.kv_identity),
            (_TAG_ADAPTER, encode_text(adapter)),
            (_TAG_RANK, f"{rank}/{ranks}".encode()),
        )
        self._row_nbytes = _FIELD_HEAD_NBYTES + 4 * self._block_tokens
        self._public_key = self._key(_TAG_PUBLIC, b"")
        self._public_root = self._root(self._public_key, "")
        self._public = _Public()

    def set_public(self, prefixes: Sequence[npt.NDArray[np.int64]]) -> None:
        """See PrefixCache. ValueError, and nothing changes, for what `hashes` refuses."""
        chains = [list(self._public_names(self._token_fields(prefix))) for prefix in prefixes]
        self._public = _Public(frozenset().union(*chains), max(map(len, chains), default=0))

    @property
    def public_names(self) -> frozenset[BlockHash]:
        """Names of all blocks that are public now."""
        return self._public.names

    def public_blocks(self, tokens: npt.NDArray[Any], *, salt: str) -> int:
        """See PrefixCache."""
        public = self._public
        if salt or not public.blocks:
            return 0
        found = 0
        for name in self._public_names(self._token_fields(tokens[: public.blocks * self._block_tokens])):
            if name not in public.names:
                break
            found += 1
        return found

    def hashes(
        self, tokens: npt.NDArray[Any], *, namespace: str, salt: str, public: int = 0
    ) -> list[BlockHash]:
        """Names of the whole blocks of `tokens` (integers, [N]); a last partial block has none.

        ValueError if a token does not fit u32: wrapped around, two prompts would share a name. ValueError for
        public blocks with a salt, which is for having blocks apart from all others.
        """
        if public < 0 or (public and salt):
            raise ValueError(f"public: must be ≥ 0, and 0 with a salt, got {public}")
        rows = self._token_fields(tokens)
        border = public * self._row_nbytes
        names = list(self._public_names(rows[:border])) if public else []
        if rest := rows[border:]:
            key = self._key(_TAG_NAMESPACE, encode_text(namespace))
            parent = names[-1] if names else self._root(key, salt)
            names += self._names(rest, key=key, parent=parent)
        return names

    def _public_names(self, rows: bytes) -> Iterator[BlockHash]:
        return self._names(rows, key=self._public_key, parent=self._public_root)

    def _key(self, tag: int, text: bytes) -> bytes:
        return derive_key(self._naming_secret, purpose=_PURPOSE, context=encode_fields([(tag, text)]))

    def _root(self, key: bytes, salt: str) -> bytes:
        seed = encode_fields((*self._seed_fields, (_TAG_SALT, encode_text(salt))))
        return blake2b(seed, digest_size=HASH_NBYTES, key=key).digest()

    def _names(self, rows: bytes, *, key: bytes, parent: bytes) -> Iterator[BlockHash]:
        # The keyed state with the constant first bytes is copied per block: a third less time than keying
        # anew. Untyped, as even the call that says what a name is would be felt.
        keyed: Callable[[], Any] = blake2b(_PARENT_PREFIX, digest_size=HASH_NBYTES, key=key).copy
        width = self._row_nbytes
        for start in range(0, len(rows), width):
            state = keyed()
            state.update(parent + rows[start : start + width])
            name = parent = state.digest()
            yield name

    def _token_fields(self, tokens: npt.NDArray[Any]) -> bytes:
        """The tokens field of every whole block, one after another, built in one vectorised pass."""
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"tokens: must be integers [N], got {tokens.dtype} {list(tokens.shape)}")
        blocks = len(tokens) // self._block_tokens
        if not blocks:
            return b""
        whole = tokens[: blocks * self._block_tokens]
        if int(whole.min()) < 0 or int(whole.max()) > _U32_MAX:
            raise ValueError(f"tokens: must be in [0, {_U32_MAX}], got {whole.min()} … {whole.max()}")
        nbytes = 4 * self._block_tokens
        prefix = bytes((_TAG_TOKENS,)) + nbytes.to_bytes(4, "little")
        rows = np.empty((blocks, _FIELD_HEAD_NBYTES + nbytes), np.uint8)
        rows[:, :_FIELD_HEAD_NBYTES] = np.frombuffer(prefix, np.uint8)
        rows[:, _FIELD_HEAD_NBYTES:] = whole.astype("<u4").view(np.uint8).reshape(blocks, nbytes)
        return rows.tobytes()
