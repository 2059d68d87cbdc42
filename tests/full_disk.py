"""A disk without room, for tests of what a failed write leaves behind."""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

REASON = os.strerror(errno.EFBIG)


@contextmanager
def room_for(nbytes: int) -> Iterator[None]:
    """No file grows beyond `nbytes`: as on a full disk, files can be created and writing to them fails.

    The kernel answers EFBIG, "File too large", where a full disk answers ENOSPC; it takes no root.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
