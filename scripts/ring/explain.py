"""`tensorcache ring explain HASH`: where a block belongs, where copies are, and whom a reader asks now.

The reader is the node that is asked: loads and breakers are as it sees them.
"""

import argparse
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from cachemgr.cluster.control.messages import LOOKUP, PULL, LookupRequest, PullRequest
from cachemgr.cluster.control.packed import pack_arcs, unpack_addresses
from cachemgr.contract import BlockHash
from cachemgr.ring import NodeId, Ring, extra_owners, home_of, position_of
from cachemgr.shard import SEGMENT_BLOCKS, BlockAddress
from scripts.console import say, seconds_text
from scripts.errors import UsageError
from scripts.ring.asking import Entry, NodeError, entry_from
from scripts.ring.show import Seen, look
from scripts.ring.tables import columns
from scripts.ring.views import hash_from, version_text

HEAD = ("node", "role", "state", "load", "blocks", "this block")
NUMBERS = ("load", "blocks")
_WHOLE_NBYTES = 16
_EQUAL = 2.0
"""Loads within this factor count as equal to readers."""
_MOST_PARTS = 16


@dataclass
class Found:
    """A segment, and what each node has of it."""

    name: bytes
    """As it was asked for: a hash, or the beginning of one."""
    segment: bytes
    index: int | None = None
    """Of the block in its chain; None if nobody has it."""
    blocks: dict[str, set[bytes]] = field(default_factory=dict)
    """Node → hashes of the segment's blocks there; only nodes that answer."""
    hot: int = 0
    """How many extra owners it has now."""

    @property
    def position(self) -> int:
        """On the ring; that of a hash is known from its first eight bytes."""
        return position_of(BlockHash(self.segment))

    def has_it(self, node: str) -> bool:
        """Is the block that was asked for there? For the beginning of a hash: its segment's first."""
        return any(name.startswith(self.name) for name in self.blocks.get(node, ()))


def run_explain(arguments: argparse.Namespace) -> int:
    """Print it all."""
    name = hash_from(arguments.hash)
    entry = entry_from(arguments)
    ring = Ring(entry.ring())
    first, seen = look(entry, ring)
    found = _find(entry, name, seen)
    reader = first.status.node
    extra = extra_owners(ring, BlockHash(found.segment.ljust(_WHOLE_NBYTES, b"\0")), len(seen))
    if len(found.segment) < _WHOLE_NBYTES:
        extra = ()  # they are rehashed from the whole hash
    roles = _roles(ring, found, extra)
    nodes = {one.spec.id: one for one in seen}
    found.hot = max((one.reply.status.hot.get(found.segment, 0) for one in seen if one.reply), default=0)
    choice = _choice(reader, [nodes[node] for node in ring.owners(found.position, 1 + ring.replicas)], found)
    if arguments.json:
        say(msgspec.json.encode(_as_data(ring, found, roles, nodes, extra, choice)).decode())
        return 0
    vnode, point, holder = ring.vnode_at(found.position)
    home = home_of(vnode)
    say(f"block     {name.hex()}{_place(found)}")
    say(f"segment   {found.segment.hex()}")
    say(f"position  {found.position}")
    say(f"vnode     {vnode} at {point}, on {holder}{'' if home == holder else f', moved there from {home}'}")
    say(f"ring      {version_text(ring.version)}, {ring.replicas} replicas")
    rows = [_row(node, role, nodes[node], found) for node, role in roles.items()]
    for line in columns(HEAD, rows, numbers=NUMBERS):
        say(line)
    if found.hot:
        say(f"hot now   {', '.join(extra[: found.hot])}: extra owners, which readers ask as well")
    elif extra:
        say(f"if hot    {', '.join(extra)}: extra owners, in this order")
    say(f"read now  {choice}")
    for one in seen:
        if one.reply is None:
            say(f"warning  {one.spec.id}: {one.error}")
    return 0


def _find(entry: Entry, name: bytes, seen: Sequence[Seen]) -> Found:
    answering = [one for one in seen if one.reply is not None]
    found = Found(name, name)
    if len(name) == _WHOLE_NBYTES:
        for one in answering:
            with contextlib.suppress(NodeError):  # it went away since; the next node may know
                reply = entry.ask(LOOKUP, LookupRequest(names=name), address=one.spec.address)
                for address in filter(None, unpack_addresses(reply.addresses)):
                    found.segment, found.index = address.segment, address.index
    listed: dict[str, list[BlockAddress]] = {}
    for one in answering:
        with contextlib.suppress(NodeError):  # what it has is shown as unknown
            listed[one.spec.id] = _listed(entry, one, found.position)
    if len(name) < _WHOLE_NBYTES:
        _complete(found, [address for addresses in listed.values() for address in addresses])
    for node, addresses in listed.items():
        found.blocks[node] = {one.hash for one in addresses if one.segment == found.segment}
    return found


def _complete(found: Found, listed: Sequence[BlockAddress]) -> None:
    """The one segment that begins like this, if a node has any of it."""
    segments = {address.segment for address in listed if address.segment.startswith(found.name)}
    if len(segments) > 1:
        names = ", ".join(sorted(segment.hex() for segment in segments))
        raise UsageError(f"{len(segments)} segments begin with {found.name.hex()}: name one of {names}")
    for segment in segments:
        found.segment = segment
        found.index = next((one.index for one in listed if one.hash == segment), None)


def _listed(entry: Entry, one: Seen, position: int) -> list[BlockAddress]:
    """Every block that a node has at a position, of all formats."""
    assert one.reply is not None
    ends = pack_arcs(np.array([position], np.uint64))
    listed: list[BlockAddress] = []
    for format_ in one.reply.status.formats:
        after = b""
        for _ in range(_MOST_PARTS):
            request = PullRequest(format_id=format_.format_id, low=ends, high=ends, after=after)
            reply = entry.ask(PULL, request, address=one.spec.address)
            listed += [address for address in unpack_addresses(reply.addresses) if address is not None]
            after = reply.cursor
            if not after:
                break
    return listed


def _roles(ring: Ring, found: Found, extra: Sequence[NodeId]) -> dict[str, str]:
    """Owners first, then everyone else who has something of the segment."""
    owners = ring.owners(found.position, 1 + ring.replicas)
    roles = {str(node): f"replica {rank}" if rank else "primary" for rank, node in enumerate(owners)}
    for node in sorted(node for node, blocks in found.blocks.items() if blocks and node not in roles):
        rank = extra.index(NodeId(node)) + 1 if node in extra else 0
        roles[node] = f"copy (extra owner {rank} if hot)" if rank else "copy"
    return roles


def _choice(reader: str, owners: Sequence[Seen], found: Found) -> str:
    """Whom the reader asks for this block, and why."""
    if found.has_it(reader):
        return f"{reader} reads its own copy"
    others = [one for one in owners if one.spec.id != reader]
    usable = sorted((one for one in others if _usable(one)), key=lambda one: (_load(one), one.spec.id))
    if not others:
        return f"{reader} computes it: it is the only owner, and has no copy"
    if not usable:
        return f"{reader} computes it: no other owner can be asked (see their state)"
    best = usable[0]
    if len(usable) == 1:
        why = "the only other owner" if len(others) == 1 else "the others cannot be asked (see their state)"
        return f"{reader} asks {best.spec.id}: {why}"
    equal = [one.spec.id for one in usable if _load(one) <= _EQUAL * _load(best)]
    if len(equal) > 1:
        return f"{reader} asks {' or '.join(equal)}, at random: about equally loaded"
    against = seconds_text(_load(usable[1]))
    return f"{reader} asks {best.spec.id}: less loaded ({seconds_text(_load(best))} against {against})"


def _usable(one: Seen) -> bool:
    """As far as the reader knows; one it never spoke to is worth asking."""
    return one.member is not None and one.member.state in ("closed", "unknown")


def _load(one: Seen) -> float:
    return 0.0 if one.member is None else one.member.load_s


def _row(node: str, role: str, one: Seen, found: Found) -> tuple[str, ...]:
    known = node in found.blocks
    return (
        node,
        role,
        one.state,
        "-" if one.member is None else seconds_text(_load(one)),
        str(len(found.blocks[node])) if known else "?",
        ("yes" if found.has_it(node) else "no") if known else "?",
    )


def _place(found: Found) -> str:
    if found.index is None:
        return "  (no node has it; taken for the first of its segment)"
    within = found.index % SEGMENT_BLOCKS
    return f"  (block {found.index} of its chain, {within} of its segment)"


def _as_data(
    ring: Ring,
    found: Found,
    roles: dict[str, str],
    nodes: dict[str, Seen],
    extra: Sequence[NodeId],
    choice: str,
) -> dict[str, object]:
    vnode, point, holder = ring.vnode_at(found.position)
    return {
        "block": found.name.hex(),
        "segment": found.segment.hex(),
        "index": found.index,
        "position": found.position,
        "vnode": {"id": vnode, "point": point, "home": home_of(vnode), "node": holder},
        "epoch": ring.version.epoch,
        "owners": ring.owners(found.position, 1 + ring.replicas),
        "extra_owners": extra[: found.hot],
        "extra_owners_if_hot": extra,
        "nodes": [
            {
                "id": node,
                "role": role,
                "state": nodes[node].state,
                "load_s": _load(nodes[node]),
                "blocks": len(found.blocks[node]) if node in found.blocks else None,
                "has_block": found.has_it(node) if node in found.blocks else None,
            }
            for node, role in roles.items()
        ],
        "read_now": choice,
    }


