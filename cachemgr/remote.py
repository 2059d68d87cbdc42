"""The door to tiers beyond this process: the null object that stands there while none is configured."""

from collections.abc import Callable, Sequence

from cachemgr.contract import BlockHash


class NoRemoteTiers:
    """The null object of `RemoteTiers`: nothing is beyond this process."""

    active = False

    def fetch(
        self,
        hashes: Sequence[BlockHash],
        *,
        deadline: float,
        done: Callable[[], None],
        block_s: float | None = None,
    ) -> Callable[[], None]:
        """Nothing comes: done at once."""
        done()
        return _nothing

    def offer(self, hashes: Sequence[BlockHash], index: int) -> None:
        """Nobody wants it."""

    def used(self, hashes: Sequence[BlockHash]) -> None:
        """Nobody wants to know."""

    def close(self) -> None:
        """Nothing to let go."""


def _nothing() -> None:
    """Nobody is interested anyway."""
