"""SIGINT and SIGTERM as an exception that neither gets lost nor comes at a bad moment.

An exception raised by a signal handler can come between any two instructions. Inside a destructor it is
swallowed; inside `subprocess` it can leave a lock taken that every later wait needs; between starting a
process and noting it down it makes an orphan. So the request to stop is also remembered: it is raised again
at the next pause, and within `hold` it is only remembered.
"""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Interruption:
    """One per process; `install` from the main thread."""

    def __init__(self, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._sleep = sleep
        self._asked = False
        self._held = 0

    def install(self) -> None:
        """From now on SIGINT and SIGTERM raise KeyboardInterrupt in the main thread."""
        signal.signal(signal.SIGINT, self.ask)
        signal.signal(signal.SIGTERM, self.ask)

    def ask(self, number: int, frame: FrameType | None) -> None:
        """The handler."""
        self._asked = True
        if not self._held:
            raise KeyboardInterrupt

    @contextmanager
    def hold(self) -> Iterator[None]:
        """What is done within is done whole; a request to stop comes at the next pause after it."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1

    def pause(self, seconds: float) -> None:
        """Sleep; KeyboardInterrupt if a stop was asked for, even one whose own exception was lost."""
        self.check()
        self._sleep(seconds)
        self.check()

    def check(self) -> None:
        """KeyboardInterrupt if a stop was asked for."""
        if self._asked:
            raise KeyboardInterrupt

    def ignore(self) -> None:
        """From now on nothing interrupts: what stops things must not be stopped halfway."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
