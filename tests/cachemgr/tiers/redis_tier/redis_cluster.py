"""A real Redis Cluster of three masters and a replica of the first, on free loopback ports."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests.free_ports import free_ports
from tests.redis_server import RedisServer
from tests.waiting import wait_until

MASTERS = 3
_SLOTS = 16384
_NODE_TIMEOUT_MS = "1000"


class RedisCluster:
    """`masters`, and `replica` of the first of them."""

    def __init__(self, servers: list[RedisServer]) -> None:
        self.masters = servers[:MASTERS]
        self.replica = servers[MASTERS]

    @property
    def url(self) -> str:
        """Of the last master, which no test kills."""
        return self.masters[-1].url

    def settled(self) -> bool:
        """Every node says that every slot is served."""
        return all(self.info(server, "cluster_state:ok") for server in (*self.masters, self.replica))

    def info(self, server: RedisServer, line: str) -> bool:
        return line.encode() in server.command("CLUSTER", "INFO").splitlines()

    def keys(self) -> list[int]:
        """How many keys each master holds."""
        return [int(server.command("DBSIZE")[1:]) for server in self.masters]


@contextlib.contextmanager
def running_cluster(folder: Path) -> Iterator[RedisCluster]:
    with contextlib.ExitStack() as stack:
        servers = []
        for number, bus in enumerate(free_ports(MASTERS + 1)):
            own = folder / f"node-{number}"
            own.mkdir()
            options = (
                "--cluster-enabled", "yes", "--cluster-port", str(bus), "--cluster-node-timeout",
                _NODE_TIMEOUT_MS, "--repl-diskless-sync-delay", "0",
            )  # fmt: skip
            server = stack.enter_context(RedisServer(own, *options))
            servers.append((server, bus))
        cluster = RedisCluster([server for server, _ in servers])
        for number, master in enumerate(cluster.masters):
            start, end = number * _SLOTS // MASTERS, (number + 1) * _SLOTS // MASTERS - 1
            assert master.command("CLUSTER", "ADDSLOTSRANGE", str(start), str(end)) == b"+OK"
            master.command("CLUSTER", "SET-CONFIG-EPOCH", str(number + 1))
        for server, bus in servers[1:]:
            cluster.masters[0].command("CLUSTER", "MEET", "127.0.0.1", str(server.port), str(bus))
        first = cluster.masters[0].command("CLUSTER", "MYID")
        wait_until(lambda: first in cluster.replica.command("CLUSTER", "NODES"))
        wait_until(lambda: cluster.replica.command("CLUSTER", "REPLICATE", first) == b"+OK")
        wait_until(cluster.settled)
        wait_until(lambda: cluster.info(cluster.masters[-1], "cluster_known_nodes:4"))
        yield cluster
