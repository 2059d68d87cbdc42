"""A call that may take long, with a look at the world while it runs."""

import threading
from collections.abc import Callable

LOOK_EVERY_S = 0.1


def attended(call: Callable[[], None], *, between: Callable[[], None]) -> None:
    """Run `call` on a thread of its own and `between` again and again here; what either raises is raised.

    If `between` raises, the call is left alone: it must have a limit of its own.
    """
    failures: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            call()
        except Exception as error:
            failures.append(error)
        finally:
            done.set()

    threading.Thread(target=run, name="attended", daemon=True).start()
    while not done.wait(LOOK_EVERY_S):
        between()
    for failure in failures:
        raise failure
