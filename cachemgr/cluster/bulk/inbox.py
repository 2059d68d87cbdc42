"""The receiving half of a connection: small frames a handful per system call, payloads straight to where
they belong.

What comes is read into a few hundred bytes of our own first, so that a request, or an answer without
payload, costs one system call. Of a payload, at most what came behind its head in that call is copied from
there.

Threads: the IO thread.
"""

from cachemgr.cluster.bulk.streams import Stream, fill

_AHEAD_NBYTES = 512


class Inbox:
    """Reads from a stream."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._buffer = memoryview(bytearray(_AHEAD_NBYTES))
        self._start = self._end = 0

    async def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        start = self._start
        if self._end - start >= count:
            self._start = start + count
            return self._buffer[start : start + count].tobytes()
        if count > _AHEAD_NBYTES:
            whole = memoryview(bytearray(count))
            await fill(self._stream, whole[self.move_to(whole) :])
            return whole.tobytes()
        await self._fetch(count)
        return self.move(count)

    def move(self, count: int) -> bytes:
        """So many of the bytes that are here."""
        start = self._start
        self._start = start + count
        return self._buffer[start : start + count].tobytes()

    def move_to(self, into: memoryview) -> int:
        """Bytes that are here already, at most as many as fit; how many."""
        count = min(len(into), self._end - self._start)
        if count:
            into[:count] = self._buffer[self._start : self._start + count]
            self._start += count
        return count

    async def _fetch(self, count: int) -> None:
        """Until `count` bytes are here. A short read means that there is no more now: wait, do not try
        again.
        """
        left = self.move(self._end - self._start)
        self._buffer[: len(left)] = left
        self._start, self._end = 0, len(left)
        while self._end < count:
            got = self._stream.try_receive(self._buffer[self._end :])
            self._end += got
            if self._end < count:
                await self._stream.receivable(count - self._end)
