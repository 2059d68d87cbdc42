"""The verbs of `tensorcache ring` and their options."""

import argparse
from collections.abc import Callable

from scripts.arguments import Verbs, add_verb, positive
from scripts.ring.options import add_entry

EXAMPLES = """
  tensorcache ring show                                   # the cluster of the node that build/run serves
  tensorcache ring show --at 127.0.0.1:8005 --cluster demo
  tensorcache ring drain node-3 --config /etc/tensorcache/tensorcache.toml

Every change says which ring it replaces; of two at once, one fails with the ring it lost to, and exit code 1.
"""
_SHOW = """
  tensorcache ring show
  tensorcache ring show --at 127.0.0.1:8005 --cluster demo --json
"""
_OWNERS = """
  tensorcache ring owners 8f14e45fceea167a5a36dedd4bea2543      # the hash of a segment's first block
  tensorcache ring owners 0 9223372036854775808 0xffffffffffffffff
"""
_ADD = """
  tensorcache ring add node-4 --address 10.0.0.4:8005
  tensorcache ring add node-4 --address 10.0.0.4:8005 --domain rack-2 --weight 0.5

The node may be started before or after. One that drains comes back by being added again.
"""
_REMOVE = """
  tensorcache ring remove node-4

At once: what only it has is lost. `tensorcache ring drain node-4` first, and wait until it holds 0 vnodes and
the others show no `pulling` any more.
"""
_MOVE = """
  tensorcache ring move node-1#17 node-2       # `ring owners` and `ring explain` name vnodes
  tensorcache ring move node-1#17 node-1       # back home
"""
_DRAIN = """
  tensorcache ring drain node-4
"""
_REPLICAS = """
  tensorcache ring replicas 2                  # 0 to 3 copies beside the primary
"""
_EXPLAIN = """
  tensorcache ring explain 8f14e45fceea167a5a36dedd4bea2543
  tensorcache ring explain 8f14e45fceea167a --at 127.0.0.1:8005     # a segment, by the first digits

Segment, position, vnode and owners of a block, which nodes have it, and whom the node at --at would ask.
"""


def add_parser(verbs: Verbs) -> None:
    """Add this verb to the command line."""
    summary = "show and change which node of a cluster has what"
    ring = add_verb(verbs, "ring", summary=summary, examples=EXAMPLES)
    parts = ring.add_subparsers(dest="part", required=True, metavar="PART")
    _part(parts, "show", "the ring, its nodes, their state and what they hold", _SHOW)
    owners = _part(parts, "owners", "which nodes have these segments, primary first", _OWNERS)
    what = "32 hex digits, or a number below 2^64"
    owners.add_argument("places", nargs="+", metavar="HASH|POSITION", help=what)
    add = _change(parts, "add", "put a node on the ring", _ADD)
    add.add_argument("node", metavar="ID", help="its id: a-z, 0-9, '.' and '-'")
    add.add_argument("--address", required=True, metavar="HOST:PORT", help="its control service")
    add.add_argument("--domain", default="", help="failure domain (default: one of its own)")
    add.add_argument("--weight", type=float, default=1.0, help="128 vnodes per 1 (default %(default)s)")
    remove = _change(parts, "remove", "take a node off the ring, at once", _REMOVE)
    drain = _change(parts, "drain", "let a node give its vnodes away while it serves", _DRAIN)
    for part in (remove, drain):
        part.add_argument("node", metavar="ID", help="its id")
    move = _change(parts, "move", "give a vnode to a node", _MOVE)
    move.add_argument("vnode", metavar="VNODE", help="HOME#NUMBER")
    move.add_argument("node", metavar="NODE", help="who has it from now on")
    replicas = _change(parts, "replicas", "keep another number of copies", _REPLICAS)
    replicas.add_argument("count", type=int, metavar="N", help="copies beside the primary, 0 to 3")
    explain = _part(parts, "explain", "why a block is where it is, and who is asked for it", _EXPLAIN)
    what = "32 hex digits of a block hash, or at least the first 16 of a segment's"
    explain.add_argument("hash", metavar="HASH", help=what)


def _part(parts: Verbs, name: str, summary: str, examples: str) -> argparse.ArgumentParser:
    parser = add_verb(parts, name, summary=summary, examples=examples)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    add_entry(parser)
    parser.set_defaults(handler=_handler(name))
    return parser


def _change(parts: Verbs, name: str, summary: str, examples: str) -> argparse.ArgumentParser:
    parser = _part(parts, name, summary, examples)
    parser.add_argument(
        "--replaces", type=positive, metavar="EPOCH", help="only if that ring is in force (default: any)"
    )
    return parser


def _handler(name: str) -> Callable[[argparse.Namespace], int]:
    """The verb's function, imported when it runs: what speaks gRPC takes its time."""

    def run(arguments: argparse.Namespace) -> int:
        from scripts.ring import change, explain, show

        verbs: dict[str, Callable[[argparse.Namespace], int]] = {
            "show": show.run_show, "owners": show.run_owners, "explain": explain.run_explain,
            "add": change.run_add, "remove": change.run_remove, "move": change.run_move,
            "drain": change.run_drain, "replicas": change.run_replicas,
        }  # fmt: skip
        return verbs[name](arguments)

    return run
