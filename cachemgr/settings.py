"""How a node's host tier is set up, checked field by field before anything is opened."""

import os
import re
from pathlib import Path

import msgspec

from cachemgr.errors import SettingsError

_NAME = re.compile(r"[a-z0-9.-]{1,63}")
_GIB = 1 << 30
_DEFAULT_MAX_BYTES = 8 * _GIB
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class CacheSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Node-wide settings of the host tier.

    `host_bytes` bounds all arenas of the node together (None: `default_bound`). `arena_bytes` bounds what one
    process may hold of it, for nodes on which several serve (None: see `share`). 0 switches the tier off.
    `ttl_s`: a block that nobody used for so long is gone.
    """

    cluster: str = "local"
    node: str = "node-1"
    host_bytes: int | None = None
    arena_bytes: int | None = None
    ttl_s: float = 3600.0
    directory: str = "/dev/shm"

    def __post_init__(self) -> None:
        for field in ("cluster", "node"):
            value = getattr(self, field)
            if not _NAME.fullmatch(value):
                raise SettingsError(field, "must be 1 to 63 characters of a-z, 0-9, '.' and '-'", value)
        for field in ("host_bytes", "arena_bytes"):
            value = getattr(self, field)
            if value is not None and value < 0:
                raise SettingsError(field, "must be ≥ 0", value)
        if not self.ttl_s > 0:
            raise SettingsError("ttl_s", "must be > 0", self.ttl_s)

    def share(self, bound: int) -> int:
        """Bytes that one process may hold of `bound`.

        All of a bound that somebody chose. Half of a default one: the rest is for a second model, or for the
        process that replaces this one and reads its blocks meanwhile.
        """
        if self.arena_bytes is not None:
            return min(self.arena_bytes, bound)
        return bound if self.host_bytes is not None else bound // 2


def default_bound(directory: str, *, held: int) -> int:
    """min(8 GiB, ¼ of memory or of the cgroup's limit, ½ of what is free in `directory`), in bytes.

    `held` bytes of this node's own arenas count as free: otherwise every restart would halve the tier.
    """
    space = os.statvfs(directory)
    free = space.f_bavail * space.f_frsize + held
    return min(_DEFAULT_MAX_BYTES, _memory_bytes() // 4, free // 2)


def _memory_bytes() -> int:
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in _CGROUP_LIMITS:
        try:
            text = Path(path).read_text(encoding="ascii").strip()
        except OSError:
            continue  # the other cgroup version, or none
        if text.isdigit():
            limits.append(int(text))
    return min(limits)
