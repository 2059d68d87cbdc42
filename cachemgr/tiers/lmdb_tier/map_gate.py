"""Lets any number of threads use the memory map, or one alone change it.

Invariant: no transaction of this process is active while the map is resized or closed.
Threads: any; every wait has a bound.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_USE_S = 10.0
"""Longer than any resize takes."""


class MapGate:
    """`using` around each transaction, `alone` around what moves the map."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._users = 0
        self._alone = False

    @contextmanager
    def using(self) -> Iterator[None]:
        """The map stays where it is. TimeoutError if somebody changes it for too long."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._alone, _USE_S):
                raise TimeoutError("the map is being changed")
            self._users += 1
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self, limit_s: float) -> Iterator[None]:
        """Nobody uses the map; new users wait. TimeoutError if those that do take longer than `limit_s`."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._alone, limit_s):
                raise TimeoutError("the map is being changed")
            self._alone = True
            try:
                if not self._changed.wait_for(lambda: not self._users, limit_s):
                    raise TimeoutError("the map is in use")
            except TimeoutError:
                self._alone = False
                self._changed.notify_all()
                raise
        try:
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()
