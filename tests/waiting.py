"""For what happens in another thread or process and has no event to wait for."""

import time
from collections.abc import Callable

LIMIT_S = 60.0
"""Far longer than anything takes: a slow machine is not a wrong answer."""

_LOOK_S = 0.005


def wait_until(condition: Callable[[], object], *, limit_s: float = LIMIT_S) -> None:
    """Look until it holds; AssertionError if it never does."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"it did not become true within {limit_s:g} s"
        time.sleep(_LOOK_S)
