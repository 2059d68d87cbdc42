"""One bulk connection, either end: reads frames and hands them on, payloads straight into reserved slots.

Whose frames they are, and what they mean, is the handler's: `bulk_client` on one side, `bulk_server` on the
other.

Invariant: once `run` ends, by whatever, every block that was under way has given its slot back.
Threads: the IO thread.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from cachemgr.cluster.bulk.frames import (
    BLOCK,
    BLOCK_META,
    BLOCK_META_NBYTES,
    HEAD_NBYTES,
    SLICE,
    MalformedFrame,
    parse_head,
)
from cachemgr.cluster.bulk.inbox import Inbox
from cachemgr.cluster.bulk.incoming import IncomingBlock
from cachemgr.cluster.bulk.outbox import Outbox
from cachemgr.cluster.bulk.streams import Stream, StreamEnded

_YIELD_NBYTES = 4 << 20
"""After so many bytes without a wait, others of the loop have their turn."""


class FrameHandler(Protocol):
    """What the two ends make of frames. Nothing here waits; a MalformedFrame or PeerTrouble ends the
    connection.
    """

    def on_frame(self, kind: int, request: int, body: bytes) -> None:
        """A frame other than BLOCK and SLICE."""
        ...

    def begin_block(self, request: int, index: int, header: bytes) -> IncomingBlock:
        """A block begins; its payload is put where it says."""
        ...

    def end_block(self, request: int, index: int, block: IncomingBlock) -> None:
        """All of its payload has come."""
        ...


class Channel:
    """Frames over a stream."""

    def __init__(
        self,
        stream: Stream,
        *,
        accepts: frozenset[int],
        handler: FrameHandler,
        clock: Callable[[], float],
    ) -> None:
        self._stream = stream
        self._inbox = Inbox(stream)
        self._accepts = accepts
        self._handler = handler
        self._clock = clock
        self._blocks: dict[int, tuple[int, IncomingBlock]] = {}
        """Request → the block of it that is under way: index, and where it goes."""
        self._broken: OSError | None = None
        self.outbox = Outbox(stream, on_broken=self._on_broken)
        self.last_heard = clock()
        """When the last bytes came."""
        self._unyielded = 0

    async def run(self) -> None:
        """Read until the connection ends: StreamEnded, OSError, MalformedFrame, or what the handler
        raises.
        """
        take = self._inbox.take
        try:
            while True:
                head = await take(HEAD_NBYTES)
                self.last_heard = self._clock()
                if self._unyielded >= _YIELD_NBYTES:
                    self._unyielded = 0
                    await asyncio.sleep(0)
                length, kind, request = parse_head(head, self._accepts)
                if kind == BLOCK:
                    self._begin(request, await take(BLOCK_META_NBYTES))
                    await self._receive(request, length - BLOCK_META_NBYTES)
                elif kind == SLICE:
                    await self._receive(request, length)
                else:
                    self._handler.on_frame(kind, request, await take(length))
        except StreamEnded:
            if self._broken is not None:
                raise self._broken from None
            raise
        finally:
            self.close()

    def drop_block(self, request: int) -> None:
        """Nobody wants the block of this request that is under way."""
        if request in self._blocks:
            self._blocks[request][1].drop()

    def forget_block(self, request: int) -> None:
        """A request has ended; a block of it that is not whole never will be."""
        entry = self._blocks.pop(request, None)
        if entry is not None:
            entry[1].drop()

    def close(self) -> None:
        """Let go of the socket, and of everything pinned or reserved for it. Idempotent."""
        self.outbox.close()
        self._stream.close()
        while self._blocks:
            _, (_, block) = self._blocks.popitem()
            block.drop()

    def _on_broken(self, error: OSError) -> None:
        self._broken = error
        self.close()

    def _begin(self, request: int, meta: bytes) -> None:
        if request in self._blocks:
            raise MalformedFrame("block", "one at a time per request", request)
        (index,) = BLOCK_META.unpack_from(meta)
        block = self._handler.begin_block(request, index, meta[BLOCK_META.size :])
        self._blocks[request] = index, block

    async def _receive(self, request: int, count: int) -> None:
        """Receive a slice of a payload."""
        entry = self._blocks.get(request)
        if entry is None:
            raise MalformedFrame("slice", "of a block that has begun", request)
        index, block = entry
        if count > block.missing:
            raise MalformedFrame("slices of a block", f"{block.missing} bytes more", count)
        stream = self._stream
        while count:
            # Asked again after every wait: the block may have been dropped meanwhile.
            room = block.room(count)
            got = self._inbox.move_to(room) or stream.try_receive(room)
            if got:
                block.advance(got)
                count -= got
                self._unyielded += got
                self.last_heard = self._clock()
            else:
                self._unyielded = 0
                await stream.receivable(count)
        if not block.missing:
            del self._blocks[request]
            self._handler.end_block(request, index, block)
