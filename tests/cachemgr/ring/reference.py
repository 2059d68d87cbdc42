"""A second implementation of the ring, to check the product's against: slow, short, and sharing nothing with
it but the library that computes MurmurHash3.

It follows the rules alone. Vnode i of a node lies at the first 8 bytes, little endian, of MurmurHash3 x64
128 of "node#i"; a node has 128 × weight vnodes, halves rounded up, at least one, none while it drains; equal
points are in the order of node ids. A position belongs to the first vnode at or after it, around the ring.
Owners are met walking on from there: first one node of each failure domain, then the other nodes. An override
gives a vnode to another node unless one of the two is gone or drains. The canonical encoding is JSON with
sorted keys and no spaces; its BLAKE2b-128 is the digest.

`python -m tests.cachemgr.ring.reference > tests/cachemgr/ring/vectors/ring.json` makes the vectors.
"""

import copy
import hashlib
import json
import math
from typing import Any

import mmh3

State = dict[str, Any]
"""A ring as plain JSON: epoch, nodes, overrides, replicas."""

TOP = (1 << 64) - 1
WANTED = 4
EXTRA = 3


def murmur(data: bytes) -> int:
    return int(mmh3.mmh3_x64_128_utupledigest(data)[0])


def blake(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def vnodes(node: State) -> int:
    return 0 if node["draining"] else max(1, math.floor(128 * node["weight"] + 0.5))


def points(node: State) -> list[int]:
    return [murmur(f"{node['id']}#{number}".encode()) for number in range(vnodes(node))]


def placed(state: State) -> list[tuple[int, str, int, str]]:
    """Every vnode in the order of the ring: its point, home, number, and the node that has it."""
    serving = {node["id"] for node in state["nodes"] if not node["draining"]}
    ring = []
    for node in state["nodes"]:
        for number, point in enumerate(points(node)):
            target = state["overrides"].get(f"{node['id']}#{number}", node["id"])
            ring.append((point, node["id"], number, target if target in serving else node["id"]))
    return sorted(ring)


def owners(state: State, ring: list[tuple[int, str, int, str]], position: int, n: int) -> list[str]:
    domain = {node["id"]: node["domain"] or node["id"] for node in state["nodes"]}
    ahead = [vnode for vnode in ring if vnode[0] >= position]
    walk = [vnode[3] for vnode in ahead + [vnode for vnode in ring if vnode[0] < position]]
    chosen: list[str] = []
    for node in walk:
        if domain[node] not in [domain[other] for other in chosen]:
            chosen.append(node)
    for node in walk:
        if node not in chosen:
            chosen.append(node)
    return chosen[:n]


def extra_owners(state: State, ring: list[tuple[int, str, int, str]], segment: bytes, k: int) -> list[str]:
    base = owners(state, ring, int.from_bytes(segment[:8], "little"), 1 + state["replicas"])
    found: list[str] = []
    turn = 0
    while len(found) < k:
        turn += 1
        [node] = owners(state, ring, murmur(segment + f"#{turn}".encode()), 1)
        if node not in base + found:
            found.append(node)
    return found


def encoded(state: State) -> str:
    return json.dumps(state, sort_keys=True, separators=(",", ":"))


def node(name: str, *, domain: str = "", weight: float = 1.0, draining: bool = False) -> State:
    address = f"{name}.example:7400"
    return {"id": name, "address": address, "domain": domain, "weight": weight, "draining": draining}


def states() -> list[State]:
    """Three epochs: at first; with vnode 17 of b-2 moved to c-1; with a heavier node more."""
    first = [
        node("a-1", domain="rack-a"),
        node("a-2", domain="rack-a"),
        node("b-1", domain="rack-b"),
        node("b-2", domain="rack-b"),
        node("c-1", domain="rack-c"),
        node("d-1"),
        node("f-1", domain="rack-c", draining=True),
    ]
    one: State = {"epoch": 1, "nodes": first, "overrides": {}, "replicas": 1}
    two: State = {**copy.deepcopy(one), "epoch": 2, "overrides": {"b-2#17": "c-1"}}
    three: State = {**copy.deepcopy(two), "epoch": 3}
    three["nodes"].insert(6, node("e.1", domain="rack-b", weight=1.51953125))  # 194.5 vnodes: 195
    return [one, two, three]


def positions(ring: list[tuple[int, str, int, str]]) -> list[int]:
    """1,000: the ends of the ring, on and beside every seventh point, and drawn ones."""
    chosen = [0, 1, TOP - 1, TOP]
    for vnode in ring[::7]:
        chosen += [vnode[0] - 1, vnode[0], (vnode[0] + 1) & TOP]
    moved = next(vnode for vnode in ring if vnode[1:3] == ("b-2", 17))
    chosen += [moved[0] - 2, moved[0]]
    drawn = (murmur(f"position {number}".encode()) for number in range(1000))
    return [*chosen, *drawn][:1000]


def vectors() -> State:
    epochs = states()
    rings = [placed(state) for state in epochs]
    names = sorted({node["id"] for state in epochs for node in state["nodes"]})
    segments = [blake(f"segment {number}".encode()) for number in range(50)]
    return {
        "about": "made by tests/cachemgr/ring/reference.py; points and positions in hex",
        "epochs": [
            {"encoded": encoded(state), "digest": blake(encoded(state).encode()).hex()} for state in epochs
        ],
        "points": {
            node["id"]: [f"{point:016x}" for point in points(node)] for node in epochs[-1]["nodes"]
        },
        "about_owners": "position, then its first four owners at each epoch, numbers of `nodes`",
        "nodes": names,
        "owners": [
            [
                f"{position:016x}",
                *(
                    "".join(str(names.index(owner)) for owner in owners(state, ring, position, WANTED))
                    for state, ring in zip(epochs, rings, strict=True)
                ),
            ]
            for position in positions(rings[0])
        ],
        "about_extra_owners": "hash of a segment, then its first three extra owners at the last epoch",
        "extra_owners": [
            [segment.hex(), *extra_owners(epochs[-1], rings[-1], segment, EXTRA)] for segment in segments
        ],
    }


def text(found: State) -> str:
    """One row a line, as it is checked in."""
    lines = []
    for key, value in found.items():
        if isinstance(value, list) and not isinstance(value[0], str):
            body = "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in value) + "\n ]"
        elif isinstance(value, dict):
            rows = (f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in value.items())
            body = "{\n" + ",\n".join(rows) + "\n }"
        else:
            body = json.dumps(value)
        lines.append(f" {json.dumps(key)}: {body}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    print(text(vectors()), end="")
