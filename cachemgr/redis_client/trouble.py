"""What can go wrong with a Redis, as one line that names it as host:port and never shows a password."""

import ssl
from enum import StrEnum

from cachemgr.errors import CacheError, one_line
from cachemgr.redis_address import RedisAddress
from cachemgr.redis_client.redis_py import exceptions

_SHOWN = 200


class Kind(StrEnum):
    """What sort of trouble it is."""

    ABSENT = "absent"
    """Nobody listens, the connection broke, or what came is not Redis."""
    SILENT = "silent"
    """No answer, or not all of it, in time."""
    LOADING = "loading"
    """Not ready, or without a majority or a master: soon perhaps."""
    LOGIN = "login"
    """Wrong user or password, or none where one is wanted."""
    FULL = "full"
    FORBIDDEN = "forbidden"
    READ_ONLY = "read-only"
    ELSEWHERE = "elsewhere"
    """Of a Redis Cluster: another node has it."""
    REFUSED = "refused"
    """Any other answer that is an error."""


_UNANSWERED = (Kind.ABSENT, Kind.SILENT, Kind.LOADING)


class RedisTrouble(CacheError):
    """Redis is not there, too slow, or said no; `refused` if it answered: asking again is of no use."""

    def __init__(self, text: str, *, kind: Kind, reason: str = "") -> None:
        super().__init__(text)
        self.kind = kind
        self.reason = reason or text
        """The text without who it is."""

    @property
    def refused(self) -> bool:
        """It answered: no."""
        return self.kind not in _UNANSWERED


def trouble_of(error: Exception, address: RedisAddress, *, waited_s: float) -> RedisTrouble:
    """What `error` of redis-py, of a socket or of the loop means."""
    if isinstance(error, RedisTrouble):
        return error
    kind, reason = _judged(error, waited_s)
    if address.password:
        reason = reason.replace(address.password, "…")
    reason = one_line(reason)  # it may quote what the server said
    return RedisTrouble(f"Redis at {address} {reason}", kind=kind, reason=reason)


def _judged(error: Exception, waited_s: float) -> tuple[Kind, str]:
    shown = " ".join(str(error).split())[:_SHOWN] or type(error).__name__
    match error:
        case exceptions.AuthenticationError():
            return Kind.LOGIN, "refuses this user name and password"
        case exceptions.OutOfMemoryError():
            return Kind.FULL, "is full: raise its maxmemory, or let what does not belong there expire"
        case exceptions.NoPermissionError():
            return Kind.FORBIDDEN, f"does not permit what is needed: {shown}"
        case exceptions.BusyLoadingError():
            return Kind.LOADING, "is still loading its data"
        case exceptions.ReadOnlyError():
            return Kind.READ_ONLY, "is a read-only replica: name the one that takes writes"
        case exceptions.AskError():  # MovedError is one
            return Kind.ELSEWHERE, "says that another node of its cluster has this"
        case exceptions.ClusterDownError() | exceptions.MasterDownError() | exceptions.TryAgainError():
            return Kind.LOADING, f"cannot answer at the moment: {shown}"
        case exceptions.ResponseError():
            return Kind.REFUSED, f"refuses: {shown}"
        case exceptions.TimeoutError() | TimeoutError():
            return Kind.SILENT, f"does not answer within {waited_s:g} s"
    if isinstance(error.__cause__ or error.__context__, ssl.SSLError):
        return Kind.ABSENT, f"does not prove who it is: {shown}"
    return Kind.ABSENT, f"is not there: {shown}"
