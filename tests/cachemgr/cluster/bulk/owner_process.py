"""A node in a process of its own, with blocks and a bulk server; a ticket for every line. Started by
OwnerProcess.
"""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from cachemgr.cluster.bulk.opening import BulkDoor
from cachemgr.cluster.bulk.server import BulkServer
from cachemgr.cluster.bulk.tickets import Tickets
from tests.cachemgr.cluster.bulk.pair import BIG, OWNER, READER, FixedRings, fill, settings
from tests.cachemgr.host import Host, chain
from tests.cachemgr.node import open_node


class OwnerProcess:
    """As a test sees it."""

    def __init__(self, host: Host, *, blocks: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(host.directory), str(blocks)],
            cwd=Path(__file__).resolve().parents[4], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._port = int(self._line())

    async def door(self, *, same_host: bool = False) -> BulkDoor:
        assert self._process.stdin
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return BulkDoor("127.0.0.1", self._port, bytes.fromhex(self._line()), same_host, tls=False)

    def signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def close(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.wait(30)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe
            pipe.close()

    def _line(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline().strip()


async def serve(directory: str, blocks: int) -> None:
    node = open_node(Host(Path(directory)), "owner", block_format=BIG, blocks=blocks)
    fill(node, chain(node.cache, blocks), BIG)
    tickets = Tickets()
    server = BulkServer(
        {node.store.format_id: node.store}.get, tickets=tickets, rings=FixedRings(OWNER),
        settings=settings(same_host=True),
    )  # fmt: skip
    print(await server.start("127.0.0.1"), flush=True)
    while await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline):
        print(tickets.issue(READER).hex(), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2])))
