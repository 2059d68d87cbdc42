"""What the door of the backend hands an admin's request to."""

from typing import Final, Protocol

from backend.access import Caller
from backend.asked import Inputs
from backend.errors import InvalidRequest
from backend.open_release import OpenRelease

ADMIN_PARAMETER: Final = "admin"
"""The request parameter that makes a request an admin's; its value is the command, JSON as text."""


class Administrator(Protocol):
    """Answers commands. Called on the server's thread, between requests: nothing here may take long."""

    def answer(self, caller: Caller, command: object, inputs: Inputs, release: OpenRelease | None) -> str:
        """The answer, JSON. `caller` may do it; `release` serves now.

        Raises InvalidRequest for what is wrong with the command.
        """
        ...


class NoCommands:
    """An Administrator that knows no command."""

    def answer(self, caller: Caller, command: object, inputs: Inputs, release: OpenRelease | None) -> str:
        """There is none."""
        raise InvalidRequest(ADMIN_PARAMETER, "is not answered here")
