"""`tensorcache ring add|remove|move|drain|replicas`: one ring in place of another.

The ring in force is read, changed, and proposed together with the version that it replaces: who comes second
changes nothing, is told what it lost to, and exits with 1.
"""

import argparse
from collections.abc import Callable

import msgspec

from cachemgr.ring import (
    NodeSpec,
    RingError,
    RingState,
    add_node,
    crowded_domain,
    drain_node,
    move_vnode,
    remove_node,
    set_replicas,
)
from scripts.console import say
from scripts.errors import RejectedError, UsageError
from scripts.ring.asking import entry_from
from scripts.ring.views import version_text

Change = Callable[[RingState], RingState]


def run_add(arguments: argparse.Namespace) -> int:
    """A node joins."""
    try:
        node = NodeSpec(arguments.node, arguments.address, arguments.domain, arguments.weight)
    except RingError as error:
        raise UsageError(str(error)) from None
    return _run(arguments, lambda state: _joined(state, node), f"{node.id} joins and takes its vnodes over")


def run_remove(arguments: argparse.Namespace) -> int:
    """A node leaves at once."""
    done = f"{arguments.node} is off the ring"
    return _run(arguments, lambda state: remove_node(state, arguments.node), done)


def run_drain(arguments: argparse.Namespace) -> int:
    """A node gives its vnodes away and stays until it is removed."""
    node = arguments.node
    done = f"{node} gives its vnodes away: `tensorcache ring remove {node}` once nobody is pulling any more"
    return _run(arguments, lambda state: drain_node(state, arguments.node), done)


def run_move(arguments: argparse.Namespace) -> int:
    """A vnode goes to another node."""
    done = f"{arguments.vnode} goes to {arguments.node}"
    return _run(arguments, lambda state: move_vnode(state, arguments.vnode, arguments.node), done)


def run_replicas(arguments: argparse.Namespace) -> int:
    """Another number of copies beside the primary."""
    done = f"{arguments.count} copies beside the primary"
    return _run(arguments, lambda state: set_replicas(state, arguments.count), done)


def _joined(state: RingState, node: NodeSpec) -> RingState:
    """RingError, too, for the address of another node: the copies that each is to keep would be one."""
    for other in state.nodes:
        if other.address == node.address and other.id != node.id:
            raise RingError("address", f"must not be that of {other.id}, which is on the ring", node.address)
    return add_node(state, node)


def _run(arguments: argparse.Namespace, change: Change, done: str) -> int:
    entry = entry_from(arguments)
    before = entry.ring()
    replaces = before.version
    if arguments.replaces is not None and arguments.replaces != replaces.epoch:
        raise RejectedError(
            f"nothing changed: the ring is {version_text(replaces)}, not {arguments.replaces}: "
            "see what it is now with `tensorcache ring show`, then repeat this"
        )
    try:
        after = change(before)
    except RingError as error:
        where = ": `tensorcache ring show` lists the nodes" if error.field in ("node", "vnode") else ""
        raise UsageError(f"{error}{where}") from None
    reply = entry.propose(after, replaces=replaces)
    if not reply.accepted:
        raise RejectedError(
            f"this change of ring {version_text(replaces)} lost to ring {version_text(reply.version)}: "
            "see what it is now with `tensorcache ring show`, then repeat this"
        )
    crowded = crowded_domain(after)
    if arguments.json:
        data = {
            "epoch": after.epoch, "digest": after.version.digest.hex(),
            "replaces": {"epoch": replaces.epoch, "digest": replaces.digest.hex()}, "warning": crowded,
        }  # fmt: skip
        say(msgspec.json.encode(data).decode())
        return 0
    say(f"ring {version_text(after.version)} replaces {version_text(replaces)}: {done}")
    if crowded:
        say(f"warning  {crowded}")
    return 0
