"""The audit log: one line per refusal and per command, without any credential."""

import logging
from typing import Final

from backend.access.contract import Caller
from backend.errors import AccessDenied
from backend.printable import printable

AUDIT_LOGGER: Final = "backend.access.audit"

log = logging.getLogger(AUDIT_LOGGER)


class AuditLog:
    """An Audit that writes to the log of the process."""

    def __init__(self, model: str) -> None:
        self._model = model

    def refused(self, request_id: str, denied: AccessDenied) -> None:
        """See Audit."""
        log.warning(
            "refused id=%s model=%s principal=%s key=%s reason=%s",
            printable(request_id), self._model, printable(denied.principal), printable(denied.key_id),
            denied.why,
        )  # fmt: skip

    def commanded(self, request_id: str, caller: Caller, command: str, outcome: str) -> None:
        """See Audit."""
        log.info(
            "command id=%s model=%s principal=%s key=%s command=%s outcome=%s",
            printable(request_id), self._model, caller.principal, caller.key_id, printable(command), outcome,
        )  # fmt: skip
