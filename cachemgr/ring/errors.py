"""What the ring refuses.

CacheError
├── RingError      a ring, or a change to one, out of its limits; names the field, the limit and the value
└── RingConflict   a change that replaces a ring which is not in force any more; names the one that is
"""

from cachemgr.errors import CacheError
from cachemgr.ring.names import Version

_SHOWN = 80


class RingError(CacheError):
    """`RingError("replicas", "must be 0 to 3", value)`; of a long value the text shows the start."""

    def __init__(self, field: str, problem: str, value: object) -> None:
        shown = repr(value)
        if len(shown) > _SHOWN:
            shown = f"{shown[:_SHOWN]}…"
        super().__init__(f"{field}: {problem}, got {shown}")
        self.field = field


class RingConflict(CacheError):
    """Somebody else's change came first: look at that ring and change it instead."""

    def __init__(self, version: Version) -> None:
        super().__init__(f"the ring was changed meanwhile: it is {version} now")
        self.version = version
