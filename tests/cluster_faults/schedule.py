"""Which faults come when: a pure function of the seed, so that a run can be had again.

A deck holds every kind once, shuffled; after the last card comes a new deck. Every fault is healed before the
next one begins.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from random import Random


class Kind(Enum):
    """What can happen."""

    KILL = "SIGKILL"
    KILL_TWO = "SIGKILL of two"
    PAUSE = "SIGSTOP"
    SLOW = "slow"
    STALL = "stalled"
    CUT = "cut off from one"
    ISOLATE = "cut off from all"
    MOVE = "vnodes moved"
    LEAVE = "drained, removed, added"
    REMOVE = "removed, added"
    REPLICAS = "replicas"
    LOSE = "lost with its arenas"


RING_CHANGES = frozenset({Kind.MOVE, Kind.LEAVE, Kind.REMOVE, Kind.REPLICAS})


@dataclass(frozen=True, slots=True)
class Fault:
    """One card. `number`: the first vnode to move, or how many replicas.

    `kill_after`: seconds from a ring change to the SIGKILL of `killed`; None: nobody is killed in it.
    """

    kind: Kind
    node: int
    other: int
    seconds: float
    number: int = 0
    kill_after: float | None = None
    killed: int = 0

    def __str__(self) -> str:
        text = f"{self.kind.value}: node {self.node}"
        if self.kind in (Kind.KILL_TWO, Kind.CUT, Kind.MOVE):
            text += f", node {self.other}"
        if self.kind is Kind.REPLICAS:
            text = f"{self.kind.value}: {self.number}"
        text += f" for {self.seconds:.1f} s"
        if self.kill_after is not None:
            text += f", SIGKILL of node {self.killed} after {self.kill_after * 1000:.0f} ms"
        return text


def draw(seed: int, *, nodes: int) -> Iterator[Fault]:
    """Faults without end, for nodes 1 … `nodes` (at least two)."""
    random = Random(seed)
    while True:
        deck = list(Kind)
        random.shuffle(deck)
        for kind in deck:
            yield _fault(kind, random, nodes)


def _fault(kind: Kind, random: Random, nodes: int) -> Fault:
    # every card draws the same number of times: a kind that is added or taken away changes no other card
    node, other = random.sample(range(1, nodes + 1), 2)
    seconds, number = random.uniform(0.8, 2.5), random.randrange(100)
    kill_after, killed = random.uniform(0.0, 0.4), random.choice((node, other))
    kills = random.random() < 0.6
    if kind is Kind.REPLICAS:
        number = (0, 2, min(3, nodes - 1))[number % 3]
    if kind not in RING_CHANGES or not kills:
        return Fault(kind, node, other, seconds, number)
    return Fault(kind, node, other, seconds, number, kill_after, killed)
