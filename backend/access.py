"""Who asks: turns the credential of a request into the namespace its blocks are named in.

Identity is derived here, from a credential, and nowhere else; what a client claims about itself in other
parameters is never read.
"""

import logging
from collections.abc import Mapping
from typing import Final, Protocol

log = logging.getLogger(__name__)

DEFAULT_NAMESPACE: Final = "default"


class Authoriser(Protocol):
    """Decides on one request."""

    def namespace(self, parameters: Mapping[str, object]) -> str:
        """The caller's namespace, from the credential in `parameters` (`authorization` or `api_key`)."""
        ...


class OpenAccess:
    """Lets everybody in, into one shared namespace; says so once."""

    def __init__(self) -> None:
        log.warning(
            "access control is off: callers share the namespace %r and can tell by timing what others asked",
            DEFAULT_NAMESPACE,
        )

    def namespace(self, parameters: Mapping[str, object]) -> str:
        """The shared namespace."""
        return DEFAULT_NAMESPACE
