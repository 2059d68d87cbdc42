"""What a connection has to send: small frames first, then the transfers in turn, frame by frame.

A transfer is asked for its next frame only when the one before has gone, so memory that it pins is let go as
early as can be. Sending happens where it was asked for as long as the socket takes it; the rest when the
loop says that the socket takes more.

Invariants: frames go whole and in one piece. A transfer is closed exactly once: when it has no more frames,
when it is removed, or when the outbox closes.
Threads: the IO thread.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from cachemgr.cluster.bulk.streams import Buffer, Stream


class Transfer(Protocol):
    """Many frames of one request."""

    def next_frame(self) -> Sequence[Buffer] | None:
        """The parts of the next frame, left unchanged until the frame after it is asked for; None: no
        more.
        """
        ...

    def progressed(self) -> None:
        """The other side took some of the frame."""
        ...

    def close(self) -> None:
        """Let go of what is pinned."""
        ...


class Outbox:
    """The sending half of a connection."""

    def __init__(self, stream: Stream, *, on_broken: Callable[[OSError], None]) -> None:
        self._stream = stream
        self._on_broken = on_broken
        self._small: list[bytes] = []
        self.small_nbytes = 0
        """Of small frames that wait: grows while the other side reads nothing."""
        self._transfers: deque[Transfer] = deque()
        self._current: Transfer | None = None
        """Whose frame is being sent."""
        self._last_frame = False
        """The current transfer was removed meanwhile: its frame goes out whole, then it ends."""
        self._rest: deque[memoryview] = deque()
        self._pumping = False
        self._closed = False

    @property
    def idle(self) -> bool:
        """Everything has gone."""
        return not (self._rest or self._small or self._transfers or self._current)

    def post(self, frame: bytes) -> None:
        """Send a small frame as soon as the frame being sent has gone."""
        self._wait(frame)
        self._pump()

    def hold_back(self, frame: bytes) -> None:
        """Send a small frame with the next one, or at `flush`."""
        self._wait(frame)

    def flush(self) -> None:
        """Send what was held back."""
        if self._small:
            self._pump()

    def add(self, transfer: Transfer) -> None:
        """Send a transfer, in turn with the others."""
        if self._closed:
            transfer.close()
            return
        self._transfers.append(transfer)
        self._pump()

    def remove(self, transfer: Transfer) -> None:
        """Ask it for no more frames; the one being sent goes out whole."""
        if transfer is self._current:
            self._last_frame = True
        elif transfer in self._transfers:
            self._transfers.remove(transfer)
            transfer.close()

    def close(self) -> None:
        """Send no more. Idempotent."""
        self._closed = True
        self._stream.not_sending()
        self._rest.clear()
        self._small.clear()
        if self._current is not None:
            self._transfers.append(self._current)
            self._current = None
        while self._transfers:
            self._transfers.popleft().close()

    def _wait(self, frame: bytes) -> None:
        self._small.append(frame)
        self.small_nbytes += len(frame)

    def _pump(self) -> None:
        if self._pumping:  # a transfer that ends may post; the loop below finds it
            return
        self._pumping = True
        try:
            while not self._closed and (self._rest or self._take_frame()):
                taken = self._stream.try_send(self._rest)
                if not taken:
                    self._stream.when_sendable(self._pump)
                    return
                self._drop(taken)
            self._stream.not_sending()
        except OSError as error:
            self._on_broken(error)
        finally:
            self._pumping = False

    def _take_frame(self) -> bool:
        """The last frame has gone: put the next one into `_rest`, behind all small ones. False if nothing is
        left.
        """
        self._put_back()
        while self._transfers:
            transfer = self._transfers.popleft()
            frame = transfer.next_frame()
            if frame is not None:
                self._current = transfer
                self._take_small()
                self._rest.extend(map(memoryview, frame))
                return True
            transfer.close()
        self._take_small()
        return bool(self._rest)

    def _put_back(self) -> None:
        transfer, self._current = self._current, None
        if transfer is None:
            return
        if self._last_frame:
            self._last_frame = False
            transfer.close()
        else:
            self._transfers.append(transfer)

    def _take_small(self) -> None:
        if self._small:
            self._rest.append(memoryview(b"".join(self._small)))
            self._small.clear()
            self.small_nbytes = 0

    def _drop(self, taken: int) -> None:
        if self._current is not None:
            self._current.progressed()
        rest = self._rest
        while taken:
            first = rest[0]
            if taken < len(first):
                rest[0] = first[taken:]
                return
            taken -= len(first)
            rest.popleft()
