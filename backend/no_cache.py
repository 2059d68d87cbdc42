"""The null prefix cache: names nothing, finds nothing, takes nothing. For models with `cache` off."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cachemgr import BlockHash, Lease, NamespaceShare, PendingBlock, Sink


class _NoLease:
    """Pins nothing."""

    blocks = 0
    ready = True

    def release(self) -> None:
        """Nothing to unpin."""


class NoCache:
    """See PrefixCache."""

    def hashes(
        self, tokens: npt.NDArray[Any], *, namespace: str, salt: str = "", public: int = 0
    ) -> list[BlockHash]:
        """No names, so that nothing below is ever asked."""
        return []

    def public_blocks(self, tokens: npt.NDArray[Any], *, salt: str = "") -> int:
        """Nothing is public."""
        return 0

    def set_public(self, prefixes: Sequence[npt.NDArray[np.int64]]) -> None:
        """Nothing is public."""

    def set_shares(self, shares: Mapping[str, NamespaceShare]) -> None:
        """There is nothing to share."""

    def usage(self) -> Mapping[str, int]:
        """Nobody holds anything."""
        return {}

    def lookup(self, hashes: Sequence[BlockHash]) -> int:
        """Nothing is known."""
        return 0

    def acquire(
        self,
        hashes: Sequence[BlockHash],
        *,
        deadline: float | None,
        block_s: float | None = None,
        namespace: str = "",
    ) -> Lease:
        """An empty lease."""
        return _NoLease()

    def restore(self, lease: Lease, *, first: int, sink: Sink) -> int:
        """Nothing to hand over."""
        return 0

    def prepare(self, hashes: Sequence[BlockHash], index: int, *, namespace: str = "") -> PendingBlock | None:
        """No slot."""
        return None

    def commit(self, pending: PendingBlock) -> None:
        """Never called: `prepare` gives nothing out."""

    def abort(self, pending: PendingBlock) -> None:
        """Never called: `prepare` gives nothing out."""

    def counters(self) -> dict[str, float]:
        """Nothing to count."""
        return {}

    def close(self) -> None:
        """Nothing to close."""
