"""What can go wrong in the command, as one tree; every text is one line that tells the user what to do.

CommandError
├── UsageError      arguments that cannot work together, a path that is not there, a port that is taken
├── TritonError     Triton is missing, did not start, or refused a request
│   └── TritonCrashed   a signal ended it while it was starting: not our input, worth a second try
└── RejectedError   the answer of a check is no: a release that is refused, a demo that did not hold
"""


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
