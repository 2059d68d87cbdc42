"""What can go wrong with a control call, as one typed error.

Of the other side:
    DEADLINE   no answer in time            REFUSED   nobody listens there
    LOST       the connection broke         GARBAGE   what answers does not speak our protocol
    BUSY       too many calls, no ring      FAILED    its handler failed
    CLUSTER    a node of another cluster    WIRE      a wire version it does not speak
    IDENTITY   another node than expected   INVALID   it refuses what we sent
    UNKNOWN    a method it does not have    CLOSED    we are closing
    PLAINTEXT  not asked: it is not on this host, and we have no certificates
"""

from enum import Enum

from cachemgr.errors import CacheError


class Trouble(Enum):
    """The kind; its value names the counter."""

    DEADLINE = "deadline"
    REFUSED = "refused"
    LOST = "lost"
    GARBAGE = "garbage"
    BUSY = "busy"
    FAILED = "failed"
    CLUSTER = "cluster"
    WIRE = "wire"
    IDENTITY = "identity"
    INVALID = "invalid"
    UNKNOWN = "unknown_method"
    CLOSED = "closed"
    PLAINTEXT = "plaintext"


ANSWERED = frozenset({Trouble.CLUSTER, Trouble.WIRE, Trouble.IDENTITY, Trouble.INVALID, Trouble.UNKNOWN})
"""The node is up; it just did not do what was asked."""

NO_PEER = frozenset({Trouble.CLUSTER, Trouble.WIRE, Trouble.IDENTITY, Trouble.PLAINTEXT})
"""What answers there is no peer of ours until somebody changes it."""


class ControlTrouble(CacheError):
    """`ControlTrouble(Trouble.DEADLINE, "Lookup: no answer in time")`."""

    def __init__(self, kind: Trouble, text: str) -> None:
        super().__init__(text)
        self.kind = kind
