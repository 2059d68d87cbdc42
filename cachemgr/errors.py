"""Everything the cache manager refuses to start with, as one tree.

CacheError
├── SettingsError   a setting out of its limits; names the field, the limit and the value
└── SecretsError    a secret file that is missing, malformed or readable by others

Once open, the cache raises for our own bugs only: trouble with data is a miss and a counter.
"""


_SHOWN = 300


class CacheError(Exception):
    """Root of the tree; its text is one line that an operator can act on."""


def one_line(text: object) -> str:
    """What a library said of a stranger's bytes, fit for a line of a log: it may quote them."""
    line = str(text)
    if not line.isprintable():
        line = ascii(line)
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}…"


class SettingsError(CacheError):
    """`SettingsError("ttl_s", "must be > 0", value)`; of a long value the text shows the start."""

    def __init__(self, field: str, problem: str, value: object) -> None:
        shown = repr(value)
        if len(shown) > _SHOWN:
            shown = f"{shown[:_SHOWN]}…"
        super().__init__(f"{field}: {problem}, got {shown}")
        self.field = field


class SecretsError(CacheError):
    """A secret cannot be used; the text names the file, never its content."""
