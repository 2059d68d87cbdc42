"""A token that two nodes have in common if, and only if, one can map the other's arenas.

Arenas are files in /dev/shm that only their user may open: the same running kernel, the same /dev/shm (a
container usually has its own), the same user.
"""

import os
from hashlib import blake2b
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_token(shared_memory: Path) -> bytes:
    """16 bytes; random, so that nobody has it in common with us, where the host cannot be told.

    `shared_memory`: where arenas lie.
    """
    try:
        parts = (_BOOT_ID.read_text().strip(), shared_memory.stat().st_dev, os.geteuid())
    except OSError:
        return os.urandom(16)
    return blake2b(repr(parts).encode(), digest_size=16).digest()
