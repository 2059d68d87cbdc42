"""Shows the kernel what Python calls a thread, so that `top -H`, `ps -L` and debuggers tell them apart.

Python does so by itself from 3.14 on.
"""

import logging
import threading
from pathlib import Path

log = logging.getLogger(__name__)

_KERNEL_CHARACTERS = 15


def show_thread_name() -> None:
    """Name the calling thread; where that is not allowed, it stays nameless."""
    name = threading.current_thread().name[:_KERNEL_CHARACTERS]
    try:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
    except OSError as error:
        log.debug("thread %s could not be named: %s", name, error)
