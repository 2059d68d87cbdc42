"""A real redis-server on a free port of loopback, without a disk, gone when the measurement ends."""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

from scripts.bench.harness import PeerMissingError
from scripts.bench.served import free_ports

_START_S = 20.0
_END_S = 10.0


@contextmanager
def redis_server() -> Iterator[int]:
    """Its port. PeerMissingError where it is not installed."""
    binary = shutil.which("redis-server")
    if binary is None:
        raise PeerMissingError("redis-server is not installed: apt-get install redis-server")
    (port,) = free_ports(1)
    command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        _wait_for(server, port)
        yield port
    finally:
        server.terminate()
        try:
            server.wait(_END_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _wait_for(server: "subprocess.Popen[bytes]", port: int) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            if server.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return
