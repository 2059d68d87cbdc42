"""Why a request was refused: words for the audit line alone; whoever was refused hears none of them."""

from enum import StrEnum


class Reason(StrEnum):
    """All there are."""

    MISSING = "missing"
    """No credential."""
    MALFORMED = "malformed"
    """It is no credential: not text, too long, another scheme, not `id.secret`."""
    AMBIGUOUS = "ambiguous"
    """More than one credential, or one header spelled in two ways."""
    UNKNOWN_KEY = "unknown_key"
    WRONG_SECRET = "wrong_secret"
    EXPIRED = "expired"
    MODEL = "model"
    """The principal may not use this model."""
    VERB = "verb"
    """The principal may not do this."""
    NOT_A_PROBE = "not_a_probe"
    """The node's own credential, in a request that is no probe."""
    ACCESS_OFF = "access_off"
    """There is no acl file, and without one nobody may do this."""
