"""A job that another thread hands to the step loop, and waits for: it runs between two steps.

Invariants
- A job runs at most once; one that nobody waits for any more does not begin.
- What it returns or raises reaches whoever asked, and is kept nowhere: an exception holds the frames it
  passed through, and those may hold a release.

Threads: `wait` by the one who asks, `run` and `refuse` by the step loop.
"""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T_co = TypeVar("T_co", covariant=True)

LOOK_S = 1.0


class LoopJob(Generic[T_co]):
    """One call, its outcome, and the event in between."""

    def __init__(self, call: Callable[[], T_co]) -> None:
        self._call: Callable[[], T_co] | None = call
        self._turn = threading.Lock()
        self._done = threading.Event()
        self._result: list[T_co] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do it, unless it was given up."""
        call = self._take()
        if call is None:
            return
        try:
            self._result.append(call())
        except BaseException as error:  # also what is no Exception: somebody waits for an outcome
            self._error = error
        finally:
            del call
            self._done.set()

    def refuse(self, error: Exception) -> None:
        """The loop ends: it will not be done."""
        if self._take() is not None:
            self._error = error
            self._done.set()

    def wait(self, limit_s: float, *, alive: Callable[[], bool]) -> T_co:
        """What it returned. TimeoutError if it did not begin within `limit_s`; raises what it raised.

        Once begun it is waited for as long as the loop is `alive`: what it works on cannot be freed under it.
        """
        if not self._done.wait(limit_s) and self._take() is not None:
            raise TimeoutError(f"the step loop took no job within {limit_s:g} s")
        while not self._done.wait(LOOK_S):
            if not alive():
                raise TimeoutError("the step loop ended inside a job")
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            return self._result.pop()
        finally:
            del error  # a traceback that reaches this frame, and this frame the error: a cycle

    def _take(self) -> Callable[[], T_co] | None:
        with self._turn:
            call, self._call = self._call, None
            return call
