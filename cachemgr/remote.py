"""The door to tiers beyond this process: the null object that stands there while none is configured."""

from collections.abc import Sequence

from cachemgr.contract import BlockHash


class NoRemoteTier:
    """A RemoteTier that never has anything and takes nothing."""

    name = "none"

    async def get(self, hashes: Sequence[BlockHash], *, deadline: float) -> list[bytes | None]:
        """All missing."""
        return [None] * len(hashes)

    async def put(self, shards: Sequence[tuple[BlockHash, memoryview]], *, deadline: float) -> int:
        """None taken."""
        return 0

    async def close(self) -> None:
        """Nothing to let go."""
