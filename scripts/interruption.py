"""SIGINT and SIGTERM as an exception that cannot get lost.

An exception raised by a signal handler is swallowed if the handler happens to run inside a destructor or a
callback of the interpreter. So the request to stop is also remembered, and raised again at the next pause.
"""

import signal
import time
from collections.abc import Callable
from types import FrameType


class Interruption:
    """One per process; `install` from the main thread."""

    def __init__(self, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._sleep = sleep
        self._asked = False

    def install(self) -> None:
        """From now on SIGINT and SIGTERM raise KeyboardInterrupt in the main thread."""
        signal.signal(signal.SIGINT, self.ask)
        signal.signal(signal.SIGTERM, self.ask)

    def ask(self, number: int, frame: FrameType | None) -> None:
        """The handler."""
        self._asked = True
        raise KeyboardInterrupt

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
