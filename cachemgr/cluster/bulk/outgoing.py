"""Blocks on their way out of the arena: pinned a few at a time, sent from where they lie.

Both directions use it: the answer to a `get` on the server, the blocks of a `put` on the client.

Invariants
- At most GROUP_NBYTES (or one block) is pinned per transfer; each group is let go when its bytes have gone,
  and all of it at `close`, whatever happened.
- Blocks go in the order given; one that is not here is said to be absent.
Threads: the IO thread.
"""

from collections.abc import Callable, Generator, Sequence

from cachemgr.cluster.bulk.frames import (
    ABSENT,
    BLOCK,
    BLOCK_META,
    BLOCK_META_NBYTES,
    RUN,
    SLICE,
    SLICE_NBYTES,
    pack_frame,
    pack_head,
)
from cachemgr.cluster.bulk.streams import Buffer
from cachemgr.contract import BlockHash
from cachemgr.host_contract import HeldShard, HostStore

GROUP_NBYTES = 8 << 20
_GROUP_BLOCKS = 64
_TOGETHER_NBYTES = 256 << 10
"""Small blocks share a system call until there is so much."""

Listed = tuple[int, BlockHash]
"""A block, and its index in the request."""


class OutgoingBlocks:
    """A Transfer of blocks of one request."""

    def __init__(
        self,
        store: HostStore,
        blocks: Sequence[Listed],
        *,
        request: int,
        sent: Callable[[HeldShard], None] = lambda shard: None,
        last_words: Callable[[], bytes] = bytes,
        progressed: Callable[[], None] = lambda: None,
        closed: Callable[[], None] = lambda: None,
    ) -> None:
        """`sent`: a block is in a frame; `last_words`: a frame behind the last block; `closed`: it is
        over.
        """
        self._store = store
        self._blocks = blocks
        self._request = request
        self._sent = sent
        self._last_words = last_words
        self._closed = closed
        self._held: list[HeldShard] = []
        self._frames = self._make_frames()
        self.progressed = progressed

    @staticmethod
    def pinned_nbytes(payload_nbytes: int, blocks: int) -> int:
        """How much a transfer of so many blocks pins at once, at most."""
        return min(blocks, group_blocks(payload_nbytes)) * payload_nbytes

    def next_frame(self) -> Sequence[Buffer] | None:
        """As Transfer."""
        return next(self._frames, None)

    def close(self) -> None:
        """As Transfer."""
        self._frames.close()
        self._let_go()
        self._closed()

    def _let_go(self) -> None:
        held, self._held = self._held, []
        if held:
            self._store.let_go(held)

    def _make_frames(self) -> Generator[list[Buffer], None, None]:
        size = group_blocks(self._store.payload_nbytes)
        parts: list[Buffer] = []
        nbytes = 0
        for start in range(0, len(self._blocks), size):
            group = self._blocks[start : start + size]
            shards = self._store.hold([name for _, name in group])
            self._held = [shard for shard in shards if shard is not None]
            for at, ((index, _), shard) in enumerate(zip(group, shards, strict=True), start + 1):
                if shard is None:
                    parts.append(pack_frame(ABSENT, self._request, RUN.pack(index, 1)))
                    continue
                *whole, last = self._slices(index, shard)
                for slice_ in whole:
                    yield [*parts, *slice_]
                    parts = []
                parts += last
                nbytes += len(last[-1])
                if nbytes >= _TOGETHER_NBYTES and at < len(self._blocks):
                    yield parts
                    parts, nbytes = [], 0
            if self._held and parts and start + size < len(self._blocks):
                yield parts  # before its blocks are let go
                parts, nbytes = [], 0
            if start + size >= len(self._blocks):
                last_words = self._last_words()
                if last_words:
                    parts.append(last_words)
                if parts:
                    yield parts
            self._let_go()

    def _slices(self, index: int, shard: HeldShard) -> list[list[Buffer]]:
        """The frames of one block."""
        payload = shard.payload
        first = payload[:SLICE_NBYTES]
        head = pack_head(BLOCK, self._request, BLOCK_META_NBYTES + len(first))
        frames: list[list[Buffer]] = [[head + BLOCK_META.pack(index) + shard.header, first]]
        for at in range(SLICE_NBYTES, len(payload), SLICE_NBYTES):
            part = payload[at : at + SLICE_NBYTES]
            frames.append([pack_head(SLICE, self._request, len(part)), part])
        self._sent(shard)
        return frames


def group_blocks(payload_nbytes: int) -> int:
    """How many blocks are pinned together."""
    return max(1, min(_GROUP_BLOCKS, GROUP_NBYTES // payload_nbytes))
