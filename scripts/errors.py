"""What can go wrong in the command, as one tree; every text is one line that tells the user what to do.

CommandError
├── UsageError      arguments that cannot work together, a path that is not there, a port that is taken
├── TritonError     Triton is missing, did not start, or refused a request
│   └── TritonCrashed   a signal ended it while it was starting: not our input, worth a second try
├── DiskError       the operating system refused a file: full, read-only, not there, not ours
└── RejectedError   the answer of a check is no: a release that is refused, a demo that did not hold
"""

import re
import shutil
from typing import Self


class CommandError(Exception):
    """Root; `tensorcache` prints it and exits with `exit_code`."""

    exit_code = 1


class UsageError(CommandError):
    """The command cannot start like this."""

    exit_code = 2


class TritonError(CommandError):
    """The server is not there, or said no."""


class TritonCrashed(TritonError):
    """A signal ended the server."""


class RejectedError(CommandError):
    """Everything ran and the answer is no."""


class DiskError(CommandError):
    """A file could not be read or written."""

    @classmethod
    def of(cls, error: OSError, *, doing: str = "") -> Self:
        """One line: what was being done, which file, and the system's reason."""
        where, reason = _reason(error)
        return cls(": ".join(part for part in (doing, where, reason) if part))


def _reason(error: OSError) -> tuple[str, str]:
    if isinstance(error, shutil.Error) and error.args and isinstance(error.args[0], list):
        _, where, text = error.args[0][0]  # of many files, the first; the text is str(OSError)
        return str(where), re.sub(r"^\[Errno \d+\] |: '.*$", "", str(text))
    return str(error.filename or ""), error.strerror or str(error) or type(error).__name__
