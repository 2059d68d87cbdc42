"""What a cluster on one machine consists of: nodes, the ports of each, and what they all serve."""

from dataclasses import dataclass, field
from pathlib import Path

from scripts.errors import UsageError
from scripts.triton_runtime import TritonAddress

PORT_STEP = 10
"""From one node's ports to the next one's; the four of a node lie closer together than that."""

MOST_NODES = 8
_WATCHDOG_S = "30"
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node: its id on the ring, its serving home, and where Triton and its control service listen."""

    id: str
    home: Path
    address: TritonAddress
    control_port: int

    @property
    def control(self) -> str:
        """Where the other nodes reach it."""
        return f"{_LOOPBACK}:{self.control_port}"


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """`count` nodes that serve `release`, signed by the owner of `key`, under the name `model`.

    `first` and `control_port` are the ports of the first node; `host_bytes` is the host tier of each.
    `lanes` are those of each. Servers that share processors are given more time for a step than one alone.
    """

    home: Path
    count: int
    release: Path
    key: Path
    model: str = "smollm2"
    cluster: str = "demo"
    first: TritonAddress = field(default_factory=TritonAddress)
    control_port: int = 8005
    host_bytes: int = 256 << 20
    lanes: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MOST_NODES:
            raise UsageError(f"--nodes must be 1 to {MOST_NODES}, got {self.count}")
        ports = [port for node in self.nodes for port in _ports(node)]
        if max(ports) > 65535:
            raise UsageError(f"{self.count} nodes need ports up to {max(ports)}, and there are 65535")
        if len(set(ports)) < len(ports):
            raise UsageError(
                f"a node's ports are {PORT_STEP} above those of the node before, and two nodes would share "
                f"one: choose HTTP, gRPC, metrics and control port within {PORT_STEP} of each other"
            )

    @property
    def parameters(self) -> dict[str, str]:
        """What is added to the model's config.pbtxt."""
        return {"lanes": str(self.lanes), "watchdog_s": _WATCHDOG_S}

    @property
    def nodes(self) -> tuple[NodePlan, ...]:
        """All nodes, in order."""
        return tuple(self._node(number) for number in range(self.count))

    def _node(self, number: int) -> NodePlan:
        name, step, first = f"node-{number + 1}", PORT_STEP * number, self.first
        address = TritonAddress(
            host=first.host,
            http_port=first.http_port + step,
            grpc_port=first.grpc_port + step,
            metrics_port=first.metrics_port + step,
        )
        return NodePlan(
            id=name, home=self.home / name, address=address, control_port=self.control_port + step
        )


def _ports(node: NodePlan) -> tuple[int, int, int, int]:
    address = node.address
    return address.http_port, address.grpc_port, address.metrics_port, node.control_port
