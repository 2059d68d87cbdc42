"""The audit log: one line per refusal and per command, without any credential.

    refused id=… model=… principal=… key=… reason=…
    command id=… model=… principal=… key=… command=… outcome=…

Invariants
- What a client wrote is one quoted word of bounded length: it forges no field and no line.
- Of refusals no more than 20 lines a second are written, and then one that says how many were left out.

Threads: any.
"""

import logging
import re
import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec

from backend.access.contract import Caller
from backend.errors import AccessDenied
from backend.printable import MAX_SHOWN, printable

AUDIT_LOGGER: Final = "backend.access.audit"
MAX_LINES_PER_S: Final = 20

_MAX_COMMAND = 1 << 20
_NAME = re.compile(r"[a-z._-]{1,40}")
_UNREADABLE = "unreadable"

log = logging.getLogger(AUDIT_LOGGER)


class _Command(msgspec.Struct):
    """What is read of a command here: its name."""

    command: str


class AuditLog:
    """An Audit that writes to the log of the process."""

    def __init__(self, model: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._model = model
        self._clock = clock
        self._lock = threading.Lock()
        self._second = clock()
        self._written = 0
        self._left_out = 0

    def refused(self, request_id: str, denied: AccessDenied) -> None:
        """See Audit."""
        self.settle()
        with self._lock:
            if self._written >= MAX_LINES_PER_S:
                self._left_out += 1
                return
            self._written += 1
        log.warning(
            "refused id=%s model=%s principal=%s key=%s reason=%s",
            _word(request_id), self._model, _word(denied.principal), _word(denied.key_id), _word(denied.why),
        )  # fmt: skip

    def commanded(self, request_id: str, caller: Caller, command: str, outcome: str) -> None:
        """See Audit. Shows the name of the command and nothing that it holds."""
        log.info(
            "command id=%s model=%s principal=%s key=%s command=%s outcome=%s",
            _word(request_id), self._model, _word(caller.principal), _word(caller.key_id), _name(command),
            _without_value(outcome),
        )  # fmt: skip

    def settle(self) -> None:
        """Say how many lines were left out, once the second is over. Any time."""
        with self._lock:
            now = self._clock()
            if now - self._second < 1:
                return
            left_out, self._left_out = self._left_out, 0
            self._second, self._written = now, 0
        if left_out:
            log.warning("refused %d more model=%s: too many for a line each", left_out, self._model)


def _word(text: str) -> str:
    shown = printable(text)
    return repr(text[:MAX_SHOWN]) if " " in shown else shown


def _name(command: str) -> str:
    """The command's name, if it looks like one."""
    if len(command) > _MAX_COMMAND:
        return _UNREADABLE
    try:
        name = msgspec.json.decode(command, type=_Command).command
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return _UNREADABLE
    return name if _NAME.fullmatch(name) else _UNREADABLE


def _without_value(outcome: str) -> str:
    """What was wrong, without what was found instead: that is the admin's, and may be anything."""
    return printable(outcome.partition(", got ")[0])
