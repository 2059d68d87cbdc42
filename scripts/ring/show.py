"""`tensorcache ring show` and `owners`: the ring in force, its nodes, and who has what."""

import argparse
from dataclasses import dataclass

import msgspec

from cachemgr.cluster.control.messages import MemberStatus, StatusReply
from cachemgr.ring import NodeId, NodeSpec, Ring, crowded_domain
from scripts.console import say, size_text
from scripts.errors import UsageError
from scripts.ring.asking import Entry, NodeError, entry_from
from scripts.ring.tables import columns
from scripts.ring.views import held_vnodes, position_from, share, version_text

HEAD = ("node", "address", "domain", "weight", "vnodes", "share", "state", "blocks", "size")
NUMBERS = ("weight", "vnodes", "share", "blocks", "size")
_DOWN_S = 0.5
"""For a node that the first one finds down: long enough to see whether that is still so."""
_BROKEN = ("open", "half-open")


@dataclass(frozen=True)
class Seen:
    """One node of the ring: what it says, or why it does not; and how the node asked first sees it."""

    spec: NodeSpec
    reply: StatusReply | None
    error: str
    member: MemberStatus | None

    @property
    def state(self) -> str:
        """Its state in few words."""
        broken = self.member is not None and self.member.state in _BROKEN
        if self.reply is None:
            return "not reachable, breaker open" if broken else "not reachable"
        words = ["breaker open"] if broken else []
        if self.member is not None and self.member.state == "refused":
            words.append("refused")
        if self.spec.draining or self.reply.draining:
            words.append("draining")
        if not self.reply.status.pulled:
            words.append("pulling")
        return ", ".join(words) or "up"


def look(entry: Entry, ring: Ring) -> tuple[StatusReply, list[Seen]]:
    """What the node asked first says, and every node of the ring, one after the other."""
    first = entry.status()
    members = {member.node: member for member in first.status.members}
    seen = []
    for spec in ring.state.nodes:
        member = members.get(spec.id)
        if spec.id == first.status.node:
            seen.append(Seen(spec, first, "", None))
            continue
        broken = member is not None and member.state in _BROKEN
        try:
            timeout_s = min(_DOWN_S, entry.timeout_s) if broken else entry.timeout_s
            seen.append(Seen(spec, entry.status(spec.address, timeout_s=timeout_s), "", member))
        except NodeError as error:
            seen.append(Seen(spec, None, error.problem, member))
        except UsageError as error:  # it is elsewhere, and we have no certificates
            seen.append(Seen(spec, None, str(error), member))
    return first, seen


def run_show(arguments: argparse.Namespace) -> int:
    """Print the ring and its nodes."""
    entry = entry_from(arguments)
    ring = Ring(entry.ring())
    first, seen = look(entry, ring)
    warnings = [text for text in (crowded_domain(ring.state),) if text]
    warnings += [text for one in seen for text in _troubles(one, ring)]
    if first.status.node not in {one.spec.id for one in seen}:
        warnings += [f"{first.status.node}: {line}" for line in first.status.trouble]
    if arguments.json:
        say(msgspec.json.encode(_as_data(ring, first, seen, warnings)).decode())
        return 0
    moved = f", {len(ring.state.overrides)} vnodes moved" if ring.state.overrides else ""
    say(f"ring {version_text(ring.version)} of cluster {entry.cluster}: "
        f"{len(seen)} nodes, {ring.replicas} replicas{moved}")  # fmt: skip
    for line in columns(HEAD, [_row(one, ring) for one in seen], numbers=NUMBERS):
        say(line)
    if first.status.previous_epoch:
        say(f"readers still ask the owners of ring {first.status.previous_epoch}, too")
    for warning in warnings:
        say(f"warning  {warning}")
    return 0


def run_owners(arguments: argparse.Namespace) -> int:
    """Print who has the segments at these positions, primary first."""
    positions = [position_from(text) for text in arguments.places]
    ring = Ring(entry_from(arguments).ring())
    found = [(text, at, ring.vnode_at(at), ring.owners(at, 1 + ring.replicas))
             for text, at in zip(arguments.places, positions, strict=True)]  # fmt: skip
    if arguments.json:
        data = [
            {"asked": text, "position": at, "vnode": vnode[0], "owners": owners}
            for text, at, vnode, owners in found
        ]
        say(msgspec.json.encode({"epoch": ring.version.epoch, "places": data}).decode())
        return 0
    say(f"ring {version_text(ring.version)}, {ring.replicas} replicas")
    rows = [
        (text, str(at), str(vnode[0]), owners[0], ", ".join(owners[1:]) or "-")
        for text, at, vnode, owners in found
    ]
    for line in columns(("asked", "position", "vnode", "primary", "replicas"), rows, numbers=("position",)):
        say(line)
    return 0


def _row(one: Seen, ring: Ring) -> tuple[str, ...]:
    spec, status = one.spec, one.reply.status if one.reply else None
    return (
        spec.id,
        spec.address,
        spec.failure_domain,
        f"{spec.weight:g}",
        str(held_vnodes(ring.state)[spec.id]),
        f"{share(ring, NodeId(spec.id)):.1%}",
        one.state,
        str(status.blocks) if status else "?",
        size_text(status.nbytes) if status else "?",
    )


def _troubles(one: Seen, ring: Ring) -> list[str]:
    if one.reply is None:
        return [f"{one.spec.id}: {one.error}"]
    lines = [f"{one.spec.id}: {line}" for line in one.reply.status.trouble]
    if one.reply.status.node != one.spec.id:
        lines.append(f"{one.spec.id}: at {one.spec.address} answers {one.reply.status.node or 'another'}")
    if one.reply.version != ring.version:
        lines.append(f"{one.spec.id}: has ring {version_text(one.reply.version)}, not (yet) this one")
    if one.member is not None and one.member.problem:
        lines.append(f"{one.spec.id}: {one.member.problem}")
    return lines


def _as_data(ring: Ring, first: StatusReply, seen: list[Seen], warnings: list[str]) -> dict[str, object]:
    held = held_vnodes(ring.state)
    return {
        "epoch": ring.version.epoch,
        "digest": ring.version.digest.hex(),
        "replicas": ring.replicas,
        "previous_epoch": first.status.previous_epoch,
        "asked": first.status.node,
        "nodes": [
            {
                "id": one.spec.id,
                "address": one.spec.address,
                "domain": one.spec.failure_domain,
                "weight": one.spec.weight,
                "vnodes": held[one.spec.id],
                "share": share(ring, NodeId(one.spec.id)),
                "draining": one.spec.draining,
                "state": one.state,
                "reachable": one.reply is not None,
                "blocks": one.reply.status.blocks if one.reply else None,
                "bytes": one.reply.status.nbytes if one.reply else None,
            }
            for one in seen
        ],
        "overrides": ring.state.overrides,
        "warnings": warnings,
    }


