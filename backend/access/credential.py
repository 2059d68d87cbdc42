"""Takes the credential out of a request's parameters: `authorization: Bearer <credential>`, or `api_key`.

Headers that the server forwards arrive as parameters, spelled as the client spelled them. Whatever else a
client says about itself is not looked at.
"""

import re
from collections.abc import Mapping
from typing import Final

from backend.access.reason import Reason
from backend.errors import AccessDenied

MAX_CREDENTIAL_CHARACTERS: Final = 256
_HEADER: Final = "authorization"
_PARAMETER: Final = "api_key"
_BEARER: Final = re.compile(r"[ \t]*bearer[ \t]+([^ \t]+)[ \t]*", re.IGNORECASE | re.ASCII)


def read_credential(parameters: Mapping[str, object]) -> str:
    """The one credential; AccessDenied for none, and for more than one even if one of them is good."""
    headers, plain = _all(parameters, _HEADER), _all(parameters, _PARAMETER)
    if len(headers) > 1 or len(plain) > 1:
        raise AccessDenied(Reason.AMBIGUOUS)
    found = {_bearer(_text(value)) for value in headers} | {_text(value).strip(" \t") for value in plain}
    if not found:
        raise AccessDenied(Reason.MISSING)
    if len(found) > 1:
        raise AccessDenied(Reason.AMBIGUOUS)
    return found.pop()


def _all(parameters: Mapping[str, object], wanted: str) -> list[object]:
    return [
        value for name, value in parameters.items() if len(name) == len(wanted) and name.lower() == wanted
    ]


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > MAX_CREDENTIAL_CHARACTERS or not value.isascii():
        raise AccessDenied(Reason.MALFORMED)
    return value


def _bearer(value: str) -> str:
    match = _BEARER.fullmatch(value)
    if match is None:
        raise AccessDenied(Reason.MALFORMED)
    return match.group(1)
