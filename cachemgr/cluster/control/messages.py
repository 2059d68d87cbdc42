"""What nodes say to each other over the control service: one struct per request and per reply, in msgpack.

    Hello    which wire versions we speak, who we are, which host we are on
    Lookup   names of blocks → where they stand in their chains, for those the node has
    Open     a door into the bulk channel: port and ticket
    Ring     get the ring, show ours (`state`), or propose a change (`state` and the version it `replaces`)
    Pull     a part of what lies in these arcs, or: these blocks have `moved` to us
    Drain    the sender is about to leave: no new requests to it
    Status   what a node sees, holds and counts, for people

Wire versions: 2 is today's. 1 is the same but for `Reply.ring`: who is behind sees by the version of a reply
that there is a newer ring, and asks for it with Ring.

Invariants
- Every size and every count is bounded before anything is built from it.
- Fields a decoder does not know are skipped, those it misses have defaults: both directions of N − 1 and N.
- Every request says who sends it, in which cluster, under which ring; every reply, under which ring.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Generic, TypeVar, cast

import msgspec

from cachemgr.cluster.control.packed import MAX_ARCS_NBYTES, MAX_CURSOR_NBYTES, MAX_NAMES, MessageError
from cachemgr.errors import one_line
from cachemgr.ring import Epoch, Version

WIRE_MIN = 1
WIRE_MAX = 2
WIRE_WITH_RING = 2
"""From this version on a newer ring is attached to whatever is answered."""

MAX_MESSAGE_NBYTES = 8 << 20
MAX_RING_NBYTES = 4 << 20
_MAX_NODES = 4096

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Wire = Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
_Node = Annotated[str, msgspec.Meta(pattern=r"\A[a-z0-9.-]{0,63}\Z")]
_Cluster = Annotated[str, msgspec.Meta(max_length=64)]
_Address = Annotated[str, msgspec.Meta(max_length=300)]
_Line = Annotated[str, msgspec.Meta(max_length=1000)]
_Digest = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
_FormatId = Annotated[bytes, msgspec.Meta(max_length=16)]
_Token = Annotated[bytes, msgspec.Meta(max_length=64)]
_RingBytes = Annotated[bytes, msgspec.Meta(max_length=MAX_RING_NBYTES)]
_Names = Annotated[bytes, msgspec.Meta(max_length=MAX_NAMES * 16)]
_Addresses = Annotated[bytes, msgspec.Meta(max_length=MAX_NAMES * 52)]
_Arcs = Annotated[bytes, msgspec.Meta(max_length=MAX_ARCS_NBYTES)]
_HashBytes = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
_Cursor = Annotated[bytes, msgspec.Meta(max_length=MAX_CURSOR_NBYTES)]


class Request(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What every request says; the client fills it in. `node` is empty where a person asks."""

    wire: _Wire = 0
    node: _Node = ""
    cluster: _Cluster = ""
    epoch: _Count = 0
    digest: _Digest = bytes(16)

    @property
    def version(self) -> Version:
        """Of the sender's ring."""
        return Version(Epoch(self.epoch), self.digest)


class Reply(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What every reply says; the server fills it in."""

    epoch: _Count = 0
    digest: _Digest = bytes(16)
    ring: _RingBytes = b""
    """The replier's ring, if it is newer than the asker's and the wire version has it."""
    draining: bool = False
    """The replier leaves: this was answered, but new requests should go elsewhere."""

    @property
    def version(self) -> Version:
        """Of the replier's ring."""
        return Version(Epoch(self.epoch), self.digest)


class HelloRequest(Request):
    """`wire_min` … `wire_max`: what the sender speaks. `wire` itself is not looked at."""

    wire_min: _Wire = 0
    wire_max: _Wire = 0


class HelloReply(Reply):
    """Who answers, what it speaks, and a token that nodes on one host (and one user) have in common."""

    node: _Node = ""
    wire_min: _Wire = 0
    wire_max: _Wire = 0
    host: _Token = b""


class LookupRequest(Request):
    """Names packed; an empty `format_id` asks for blocks of any format."""

    format_id: _FormatId = b""
    names: _Names = b""


class LookupReply(Reply):
    """One packed address per name, zeros for what is not here."""

    addresses: _Addresses = b""


class OpenRequest(Request):
    """Asks for a door into the bulk channel."""


class OpenReply(Reply):
    """An empty `host` is the one that answers. The ticket opens one connection, soon."""

    host: _Address = ""
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    ticket: _Token = b""
    tls: bool = False


class Replaces(msgspec.Struct):
    """The version that a proposed change was made from."""

    epoch: _Count
    digest: _Digest


class RingRequest(Request):
    """No `state`: give. A `state`: take it if it is newer. With `replaces`: make it the cluster's ring."""

    state: _RingBytes = b""
    replaces: Replaces | None = None


class RingReply(Reply):
    """`state`: the replier's ring if it is newer than what was shown. The reply's version is what won."""

    accepted: bool = False
    state: _RingBytes = b""


class PullRequest(Request):
    """Arcs packed as two arrays, and the cursor of the part before; or names that are with the sender now."""

    format_id: _FormatId = b""
    low: _Arcs = b""
    high: _Arcs = b""
    after: _Cursor = b""
    moved: _Names = b""


class PullReply(Reply):
    """A part of what lies in the arcs, the cursor for the next (empty: no more); how many blocks went."""

    addresses: _Addresses = b""
    cursor: _Cursor = b""
    dropped: _Count = 0


class DrainRequest(Request):
    """The sender is about to leave."""


class DrainReply(Reply):
    """Heard."""


class StatusRequest(Request):
    """For people: what do you see?"""


class MemberStatus(msgspec.Struct, omit_defaults=True):
    """Another node as this one sees it. `state`: closed, open, half-open, draining, refused, or unknown."""

    node: _Node
    address: _Address = ""
    state: Annotated[str, msgspec.Meta(max_length=32)] = "unknown"
    down_s: float = 0.0
    load_s: float = 0.0
    problem: _Line = ""


class FormatStatus(msgspec.Struct, omit_defaults=True):
    """The host tier of one block format."""

    format_id: _FormatId
    payload_nbytes: _Count = 0
    blocks: _Count = 0


_Members = Annotated[list[MemberStatus], msgspec.Meta(max_length=_MAX_NODES)]
_Formats = Annotated[list[FormatStatus], msgspec.Meta(max_length=256)]
_Lines = Annotated[list[_Line], msgspec.Meta(max_length=64)]
_Hot = Annotated[dict[_HashBytes, _Count], msgspec.Meta(max_length=4096)]
_Counters = Annotated[dict[_Line, float], msgspec.Meta(max_length=4096)]


class NodeStatus(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a node says of itself."""

    node: _Node = ""
    address: _Address = ""
    blocks: _Count = 0
    nbytes: _Count = 0
    pulled: bool = True
    """It has everything that the ring in force gave it."""
    previous_epoch: _Count = 0
    """Of the ring before, while its owners are still asked; else 0."""
    members: _Members = msgspec.field(default_factory=list)
    formats: _Formats = msgspec.field(default_factory=list)
    trouble: _Lines = msgspec.field(default_factory=list)
    counters: _Counters = msgspec.field(default_factory=dict)
    hot: _Hot = msgspec.field(default_factory=dict)
    """Segments that are read too often here → how many extra owners they have."""


class StatusReply(Reply):
    """The answer to Status."""

    status: NodeStatus = msgspec.field(default_factory=NodeStatus)


Q = TypeVar("Q", bound=Request)
R = TypeVar("R", bound=Reply)


@dataclass(frozen=True, eq=False)
class Method(Generic[Q, R]):
    """One call of the control service and the two structs that it takes."""

    name: str
    request: type[Q]
    reply: type[R]

    def decode_request(self, data: bytes) -> Q:
        """MessageError for anything but such a request."""
        return cast(Q, _decode(self.request, data))

    def decode_reply(self, data: bytes) -> R:
        """MessageError for anything but such a reply."""
        return cast(R, _decode(self.reply, data))


HELLO = Method("Hello", HelloRequest, HelloReply)
LOOKUP = Method("Lookup", LookupRequest, LookupReply)
OPEN = Method("Open", OpenRequest, OpenReply)
RING = Method("Ring", RingRequest, RingReply)
PULL = Method("Pull", PullRequest, PullReply)
DRAIN = Method("Drain", DrainRequest, DrainReply)
STATUS = Method("Status", StatusRequest, StatusReply)

METHODS: Mapping[str, Method[Any, Any]] = MappingProxyType(
    {method.name: method for method in (HELLO, LOOKUP, OPEN, RING, PULL, DRAIN, STATUS)}
)

encode_message = msgspec.msgpack.Encoder().encode
_DECODERS: Mapping[type[msgspec.Struct], msgspec.msgpack.Decoder[Any]] = MappingProxyType(
    {
        kind: msgspec.msgpack.Decoder(kind)
        for method in METHODS.values()
        for kind in (method.request, method.reply)
    }
)


def common_wire(low: int, high: int, *, ours: tuple[int, int]) -> int | None:
    """The highest wire version in both ranges; None if there is none."""
    best = min(high, ours[1])
    return best if best >= max(low, ours[0], 1) else None


def _decode(kind: type[Any], data: bytes) -> Any:
    try:
        return _DECODERS[kind].decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise MessageError(f"{kind.__name__}: {one_line(error)}") from None
