"""The ring as it is agreed on, sent and stored: nodes, moved vnodes, number of replicas, epoch.

The canonical encoding is JSON without spaces, keys sorted, every field there, numbers in shortest form: each
state has exactly one, and nothing else is decoded. Its BLAKE2b-128 is the digest of the ring's version.

Invariants: a NodeSpec or RingState that exists is within all limits below, however it was made.
"""

import re
from collections.abc import Iterable
from hashlib import blake2b
from itertools import pairwise

import msgspec

from cachemgr.errors import one_line
from cachemgr.ring.errors import RingError
from cachemgr.ring.names import Version
from cachemgr.ring.points import vnode_count

MAX_NODES = 4096
MAX_OVERRIDES = 8192
MAX_VNODES = 1 << 20
MAX_REPLICAS = 3
MAX_EPOCH = (1 << 63) - 1
MAX_NBYTES = 4 << 20
"""No state that keeps the limits above is longer; what is longer is not even parsed."""

MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0
"""Below, a node has one vnode anyway, and numbers would be written with an exponent."""

_ID = re.compile(r"[a-z0-9.-]{1,63}")
_ADDRESS = re.compile(r"(?:\[[0-9a-fA-F:.]{2,45}\]|[A-Za-z0-9.-]{1,253}):([0-9]{1,5})")
_VNODE = re.compile(r"([a-z0-9.-]{1,63})#(0|[1-9][0-9]{0,6})")
_ALPHABET = "must be 1 to 63 of a-z, 0-9, dot and hyphen"


class NodeSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One node of the cluster as the ring knows it; RingError if a field is out of its limits.

    address      host:port of its control service
    domain       failure domain: what fails together; empty: the node is one of its own
    draining     it gives its vnodes away, and is still asked for what it has
    """

    id: str
    address: str
    domain: str = ""
    weight: float = 1.0
    draining: bool = False

    def __post_init__(self) -> None:
        if _ID.fullmatch(self.id) is None:
            raise RingError("id", _ALPHABET, self.id)
        found = _ADDRESS.fullmatch(self.address)
        if found is None or not 1 <= int(found[1]) <= 65535:
            raise RingError("address", "must be host:port with a port of 1 to 65535", self.address)
        if self.domain and _ID.fullmatch(self.domain) is None:
            raise RingError("domain", f"{_ALPHABET}, or empty", self.domain)
        if not MIN_WEIGHT <= self.weight <= MAX_WEIGHT:  # NaN is not
            raise RingError("weight", f"must be {MIN_WEIGHT:g} to {MAX_WEIGHT:g}", self.weight)

    @property
    def failure_domain(self) -> str:
        """The domain, or the id where none is given."""
        return self.domain or self.id

    @property
    def vnodes(self) -> int:
        """How many vnodes are at home here; none while draining."""
        return 0 if self.draining else vnode_count(self.weight)


class RingState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A ring at one epoch; RingError if it is out of its limits.

    nodes        sorted by id, at least one of them not draining
    overrides    vnode → node that has it instead of its home. While either of them drains, without effect
    replicas     copies beside the primary
    """

    epoch: int
    nodes: tuple[NodeSpec, ...]
    overrides: dict[str, str]
    replicas: int

    def __post_init__(self) -> None:
        if not 1 <= self.epoch <= MAX_EPOCH:
            raise RingError("epoch", f"must be 1 to {MAX_EPOCH}", self.epoch)
        if not 0 <= self.replicas <= MAX_REPLICAS:
            raise RingError("replicas", f"must be 0 to {MAX_REPLICAS}", self.replicas)
        self._check_nodes()
        self._check_overrides()

    def _check_nodes(self) -> None:
        if len(self.nodes) > MAX_NODES:
            raise RingError("nodes", f"must be at most {MAX_NODES}", len(self.nodes))
        ids = [node.id for node in self.nodes]
        for first, second in pairwise(ids):
            if first >= second:
                raise RingError("nodes", "must be sorted by id and name every node once", (first, second))
        vnodes = sum(node.vnodes for node in self.nodes)
        if vnodes < 1:
            raise RingError("nodes", "must be at least one that is not draining", ids)
        if vnodes > MAX_VNODES:
            raise RingError("nodes", f"must have at most {MAX_VNODES} vnodes together", vnodes)

    def _check_overrides(self) -> None:
        if len(self.overrides) > MAX_OVERRIDES:
            raise RingError("overrides", f"must be at most {MAX_OVERRIDES}", len(self.overrides))
        if not self.overrides:
            return
        nodes = {node.id: node for node in self.nodes}
        for vnode, target in self.overrides.items():
            home = home_of(vnode)
            if home not in nodes or int(vnode.rpartition("#")[2]) >= vnode_count(nodes[home].weight):
                raise RingError("overrides", "must name vnodes of nodes of the ring", vnode)
            if target not in nodes or target == home:
                raise RingError(f"overrides.{vnode}", "must be another node of the ring", target)

    @property
    def version(self) -> Version:
        """Encodes the state: milliseconds for a thousand nodes. A Ring remembers it."""
        return Version(self.epoch, blake2b(encode_ring(self), digest_size=16).digest())

    def node(self, node_id: str) -> NodeSpec | None:
        """The node of that id."""
        return next((node for node in self.nodes if node.id == node_id), None)


def home_of(vnode: str) -> str:
    """The node that a vnode is named after; RingError if that is no name of a vnode."""
    found = _VNODE.fullmatch(vnode)
    if found is None:
        raise RingError("vnode", "must be NODE#NUMBER", vnode)
    return found[1]


def first_state(nodes: Iterable[NodeSpec], *, replicas: int) -> RingState:
    """The ring of epoch 1."""
    return RingState(1, tuple(sorted(nodes, key=lambda node: node.id)), {}, replicas)


def encode_ring(state: RingState) -> bytes:
    """The canonical encoding."""
    return msgspec.json.encode(state, order="sorted")


def decode_ring(data: bytes | memoryview) -> RingState:
    """The state of a canonical encoding, from anywhere; RingError on anything else."""
    if len(data) > MAX_NBYTES:
        raise RingError("ring", f"must be at most {MAX_NBYTES} bytes", len(data))
    try:
        state = msgspec.json.decode(data, type=RingState)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RingError("ring", f"is not an encoded ring ({one_line(error)})", bytes(data[:64])) from None
    if encode_ring(state) != data:
        raise RingError("ring", "must be in canonical form", bytes(data[:64]))
    return state
