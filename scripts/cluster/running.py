"""All servers of a cluster together: started as the machine allows, watched, stopped however it ends."""

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence

from scripts.cluster.homes import lay_out_cluster
from scripts.cluster.node import NodeServer
from scripts.cluster.plan import ClusterPlan, NodePlan
from scripts.console import complain, working
from scripts.errors import TritonError, UsageError
from scripts.interruption import Interruption
from scripts.ports import require_free

_LOOK_EVERY_S = 0.1


@contextlib.contextmanager
def running(plan: ClusterPlan, *, interruption: Interruption) -> Iterator[list[NodeServer]]:
    """Lay out and start every node; stop all on the way out, on errors, SIGINT and SIGTERM alike."""
    for node in plan.nodes:
        require_free(node.address)
        _require_control_port(node)
    with working(f"lay out {plan.count} nodes in {plan.home}"):
        lay_out_cluster(plan)
    servers = [NodeServer(node) for node in plan.nodes]
    try:
        with working(f"start {plan.count} servers"):
            bring_up(servers, interruption=interruption)
        yield servers
    finally:
        interruption.ignore()  # stopping has a limit of its own
        stop_all(servers)


def bring_up(servers: Sequence[NodeServer], *, interruption: Interruption) -> None:
    """Start servers, as many at a time as there are processors; TritonError if one does not come up."""
    at_a_time = len(os.sched_getaffinity(0))
    waiting, starting = list(servers), list[NodeServer]()
    while waiting or starting:
        while waiting and len(starting) < at_a_time:
            with interruption.hold():
                starting.append(waiting.pop(0))
                starting[-1].start()
        interruption.pause(_LOOK_EVERY_S)
        starting = [server for server in starting if not server.serving()]


def look_after(servers: Sequence[NodeServer], *, interruption: Interruption) -> None:
    """Until interrupted. A server that gave up is said once, the others go on; TritonError after the last."""
    left = list(servers)
    while left:
        interruption.pause(_LOOK_EVERY_S)
        for server in [server for server in left if server.ended]:
            complain(f"{server.plan.id} {server.ended}")
            left.remove(server)
    raise TritonError("no server of the cluster is left")


def stop_all(servers: Sequence[NodeServer]) -> None:
    """Ask all, then wait for each: together they take as long as the slowest."""
    for server in servers:
        server.ask_to_stop()
    for server in servers:
        server.stop()


def _require_control_port(node: NodePlan) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", node.control_port))
            probe.listen(1)
        except OSError as error:
            raise UsageError(
                f"port {node.control_port} for the control service of {node.id}: {error.strerror}; choose "
                f"another --control-port"
            ) from None
