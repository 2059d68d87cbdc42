"""Everything a caller of the backend can be told, as one tree; each maps to one Triton status.

BackendError
├── InvalidRequest   INVALID_ARG: names the field, the limit and the value
├── AccessDenied     INVALID_ARG: always the same text; only the audit line says why
├── Overloaded       UNAVAILABLE: the queue or the caller's allowance is full, or the backend is closing
├── EngineFailed     INTERNAL: the engine failed the step this request was in
├── DecoderGone      UNAVAILABLE: the decoder that a facade asks has died, or does not answer
├── BackendStuck     UNAVAILABLE: a thread of the backend hangs or has ended; it has to be loaded again
└── ConfigError      the model does not load; names the key, the limit and the value
"""


class BackendError(Exception):
    """Root; its text is one line for the caller."""


class InvalidRequest(BackendError):
    """Bad input. `InvalidRequest("temperature", "must be in [0, 100]", value)`."""

    def __init__(self, field: str, problem: str, value: object = None) -> None:
        shown = "" if value is None else f", got {_short(value)}"
        if not field or not field.isprintable() or len(field) > 120:  # names may come from the caller
            field = _short(field)
        super().__init__(f"{field}: {problem}{shown}")
        self.field = field


class AccessDenied(BackendError):
    """Refused, without a word about the reason: that would help who guesses. The server has no 401 or 403."""

    def __init__(self, why: str, *, principal: str = "", key_id: str = "") -> None:
        """`why` and who, as far as that is known, are for the audit line alone, and no secrets."""
        super().__init__("access denied: the credential is missing or not valid for this request")
        self.why = why
        self.principal = principal
        self.key_id = key_id


class Overloaded(BackendError):
    """No room now; the caller may try again later."""


class EngineFailed(BackendError):
    """The engine raised inside this request's step."""


class DecoderGone(BackendError):
    """The decoder that a facade asks has died, or does not answer; the caller may try again later."""


class BackendStuck(BackendError):
    """A thread of the backend hangs or has ended. Supervisors know it by its first words."""

    def __init__(self, what: str) -> None:
        super().__init__(f"the backend is stuck: {what}")


class ConfigError(BackendError):
    """config.pbtxt or tensorcache.toml is wrong; the text names the key."""


def _short(value: object, limit: int = 80) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        return f"{type(value).__name__} too long to show"
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"
