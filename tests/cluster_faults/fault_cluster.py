"""A cluster of node processes on this machine, whose nodes and links can be made to fail.

Everything lies in one folder on shared memory: arenas, rings kept, logs. Node k listens on an address of its
own and advertises its front in `network`. Odd nodes read peers through their arenas, even ones over TCP.
"""

import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cachemgr.cluster.settings import ClusterSettings
from cachemgr.ring import NodeSpec
from tests.cluster_faults.blocks import ChainId
from tests.cluster_faults.network import Network, Rule, Way, front_host, real_host
from tests.cluster_faults.node import NodeOptions
from tests.cluster_faults.node_process import NodeGoneError, NodeProcess
from tests.free_ports import free_ports

QUIET_LIMIT_S = 90.0
_LOOK_S = 0.1
_REST_S = 1.0
"""Nodes count a few times a second: what they say is a little old."""

_AT_REST = {
    "cluster_replication_queue": 0.0,
    "cluster_blocks_to_hand_over": 0.0,
    "cluster_read_repair_queue": 0.0,
    "cluster_move_settled": 1.0,
}
"""Counters of a node that has nothing left to copy."""


class FaultCluster:
    """Nodes 1 … `count`, each with room for `blocks` blocks of every format; `twice`: see NodeProcess."""

    def __init__(
        self, folder: Path, *, count: int, blocks: int, twice: Callable[[ChainId, int], None]
    ) -> None:
        self.folder = folder
        self.name = f"faults-{os.getpid()}"
        self._arenas = folder / "arenas"
        self._arenas.mkdir(parents=True)
        (port,) = free_ports(1)  # one for all: their addresses differ
        members = tuple(
            NodeSpec(id=f"node-{number}", address=f"{front_host(number)}:{port}")
            for number in range(1, count + 1)
        )
        self.nodes = {
            number: NodeProcess(
                number,
                NodeOptions(
                    cluster=self.name, node=f"node-{number}", directory=str(self._arenas), blocks=blocks,
                    settings=self._settings(number, port, members),
                ),
                log=folder / f"node-{number}.log",
                twice=twice,
            )
            for number in range(1, count + 1)
        }  # fmt: skip
        self.network = Network(lambda: {number: node.pid for number, node in self.nodes.items() if node.pid})
        self.fronts = {number: members[number - 1].address for number in self.nodes}
        """Where each is reached."""
        self.restless_s, self.was_restless = 0.0, ""

    def _settings(self, number: int, port: int, members: tuple[NodeSpec, ...]) -> ClusterSettings:
        """Times are short, as a test has a minute; rates are far above what it writes."""
        return ClusterSettings(
            listen=f"{real_host(number)}:{port}", advertise=f"{front_host(number)}:{port}", members=members,
            state_dir=str(self.folder / f"state-{number}"), same_host=bool(number % 2),
            lookup_s=0.3, call_s=1.0, lease_s=2.0, breaker_s=1.0, previous_s=20.0, down_s=4.0,
        )  # fmt: skip

    def start(self, *numbers: int) -> None:
        """Start nodes (all, if none is named) on whatever they left."""
        for number in numbers or tuple(self.nodes):
            self.network.publish(number, self.nodes[number].start())

    def kill(self, *numbers: int) -> None:
        """SIGKILL."""
        for number in numbers:
            self.nodes[number].kill()

    def lose(self, number: int) -> None:
        """Kill a node and take its memory and its disk away."""
        self.kill(number)
        for arena in self._arenas.glob(f"tensorcache_{self.name}_node-{number}_*"):
            arena.unlink()
        shutil.rmtree(self.folder / f"state-{number}", ignore_errors=True)

    def link(self, one: int, other: int, rule: Rule) -> None:
        """The rule for whatever goes between two nodes."""
        self.network.rule(one, other, rule)
        self.network.rule(other, one, rule)

    def links(self, number: int, rule: Rule) -> None:
        """The rule for whatever goes from and to a node."""
        for other in self.nodes:
            if other != number:
                self.link(number, other, rule)

    def heal(self) -> None:
        """Whoever is not there is started; whoever was stopped goes on; all links are free.

        AssertionError if one ended by itself.
        """
        self.network.heal()
        died = [node.died for node in self.nodes.values() if node.died]
        assert not died, "\n".join(died)
        for number, node in self.nodes.items():
            if node.pid:
                node.go_on()
            else:
                self.start(number)

    def held(self, chains: Sequence[ChainId]) -> dict[int, dict[ChainId, set[int]]]:
        """What is in the arenas of all nodes that run."""
        return {number: node.held(chains) for number, node in self.nodes.items() if node.pid}

    def restless(self) -> str:
        """Empty if no node has anything left to copy; else which one has what."""
        for number, node in self.nodes.items():
            try:
                counters = node.counters()
            except NodeGoneError as error:
                return str(error)
            for name, rest in _AT_REST.items():
                if counters[name] != rest:
                    return f"node {number}: {name} is {counters[name]:g}"
        return ""

    def wait_until_quiet(self, *, also: Callable[[], str] = str, limit_s: float = QUIET_LIMIT_S) -> str:
        """Empty once all nodes have been at rest for a while; else what still goes on after the limit.

        `restless_s` and `was_restless` tell afterwards how long it took, and what was last.
        """
        now = time.monotonic()
        self.restless_s, self.was_restless = 0.0, ""
        deadline, restless_at, trouble = now + limit_s, now, ""
        while time.monotonic() < restless_at + _REST_S:
            if trouble := self.restless() or also():
                restless_at, self.was_restless = time.monotonic(), trouble
                self.restless_s = restless_at - now
                if restless_at > deadline:
                    return trouble
            time.sleep(_LOOK_S)
        return ""

    def close(self) -> list[str]:
        """End all in order, remove the folder; lines about those that did not end well."""
        troubles = []
        for number, node in self.nodes.items():
            node.go_on()
            if code := node.close():
                troubles.append(f"node {number} ended with {code}:\n{node.log_tail()}")
        self.network.close()
        shutil.rmtree(self.folder)
        return troubles


STALLED, CUT = Rule(Way.STALL), Rule(Way.CUT)
SLOW = Rule(Way.SLOW, delay_s=0.02, bytes_per_s=4e6)
