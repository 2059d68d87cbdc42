"""Changes of the ring while nodes serve, and SIGKILL of either side in the middle of what they move.

As an administrator does it: a node is asked for the ring, the change is made of it and proposed with the
version that it replaces; who lost to another change begins again.
"""

import time
from collections.abc import Callable

from cachemgr.cluster.control.grpc_service import ask
from cachemgr.cluster.control.messages import RING, Replaces, RingReply, RingRequest
from cachemgr.cluster.control.trouble import ControlTrouble
from cachemgr.ring import (
    NodeSpec,
    RingError,
    RingState,
    Version,
    add_node,
    decode_ring,
    drain_node,
    encode_ring,
    move_vnode,
    remove_node,
    set_replicas,
)
from tests.cluster_faults.fault_cluster import FaultCluster
from tests.cluster_faults.schedule import Fault, Kind

REPLICAS = 1
_VNODES_AT_ONCE = 8
_CHANGE_LIMIT_S = 20.0
_CALL_S = 3.0

Change = Callable[[RingState], RingState]
"""The next ring; RingError if that cannot be made of this one."""


class RingChanges:
    """The administrator of a cluster."""

    def __init__(self, cluster: FaultCluster) -> None:
        self._cluster = cluster

    def begin(self, fault: Fault) -> None:
        """The change that a fault begins with."""
        name = f"node-{fault.node}"
        match fault.kind:
            case Kind.MOVE:
                self.change(lambda ring: _move(ring, name, f"node-{fault.other}", fault.number))
            case Kind.LEAVE:
                self.change(lambda ring: drain_node(ring, name))
            case Kind.REMOVE:
                self.change(lambda ring: remove_node(ring, name))
            case Kind.REPLICAS:
                self.change(lambda ring: set_replicas(ring, fault.number))
            case _:
                raise AssertionError(f"{fault.kind} is no change of the ring")

    def end(self, fault: Fault) -> None:
        """Everyone is there again: the ring gets back what the fault took; vnodes stay where they moved."""
        name = f"node-{fault.node}"
        match fault.kind:
            case Kind.LEAVE:
                self.change(lambda ring: remove_node(ring, name))
                self.change(lambda ring: add_node(ring, self._spec(fault.node)))
            case Kind.REMOVE:
                self.change(lambda ring: add_node(ring, self._spec(fault.node)))
            case Kind.REPLICAS:
                self.change(lambda ring: set_replicas(ring, REPLICAS))
            case _:
                pass

    def change(self, make: Change) -> None:
        """Propose until it is accepted; AssertionError if it is not in time. One that is in force is done."""
        deadline, why = time.monotonic() + _CHANGE_LIMIT_S, ""
        while time.monotonic() < deadline:
            for number, node in self._cluster.nodes.items():
                if not node.pid:
                    continue
                try:
                    if self._propose(number, make):
                        return
                except RingError:
                    return  # proposed before, and it won although the answer never came
                except ControlTrouble as trouble:
                    why = f"node {number}: {trouble}"
        raise AssertionError(f"no change of the ring in {_CHANGE_LIMIT_S:g} s: {why}")

    def trouble(self) -> str:
        """Empty if all nodes have the same ring."""
        versions: dict[Version, list[int]] = {}
        for number in self._cluster.nodes:
            try:
                versions.setdefault(self._ask(number, RingRequest()).version, []).append(number)
            except ControlTrouble as trouble:
                return f"node {number}: {trouble}"
        if len(versions) == 1:
            return ""
        return ", ".join(f"nodes {nodes} have ring {version.epoch}" for version, nodes in versions.items())

    def _propose(self, number: int, make: Change) -> bool:
        state = decode_ring(self._ask(number, RingRequest()).state)
        replaces = Replaces(state.version.epoch, state.version.digest)
        return self._ask(number, RingRequest(state=encode_ring(make(state)), replaces=replaces)).accepted

    def _ask(self, number: int, request: RingRequest) -> RingReply:
        request.cluster = self._cluster.name
        return ask(self._cluster.fronts[number], RING, request, timeout_s=_CALL_S)

    def _spec(self, number: int) -> NodeSpec:
        return NodeSpec(id=f"node-{number}", address=self._cluster.fronts[number])


def _move(ring: RingState, source: str, target: str, first: int) -> RingState:
    """Some vnodes of `source` go to `target`, those that are not there already."""
    for number in range(first, first + _VNODES_AT_ONCE):
        vnode = f"{source}#{number}"
        if ring.overrides.get(vnode, source) != target:
            ring = move_vnode(ring, vnode, target)
    return ring
