"""Runs inside the peers' own Python: stores of other projects, asked for blocks over TCP between two
processes.

    python -m scripts.bench.peer_stores mooncake|lmcache

A JSON line for a JSON line, as peer_worker: {"op": "get", "mib": 1, "blocks": 16} → {"seconds": 0.02} for
all of them, one after the other, each into memory of its own that is there already. Blocks are put and
acknowledged before, outside of the time. The other process that owns the blocks is started here; it ends
with this one.
"""

import ctypes
import importlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from scripts.bench.peer_answers import serve

_START_S = 60.0
_PR_SET_PDEATHSIG = 1


class StorePeer(Protocol):
    """A store in another process."""

    def fill(self, blocks: list[bytes]) -> None:
        """Put and wait until they are there."""
        ...

    def get(self, block: int) -> memoryview:
        """Its bytes."""
        ...

    def close(self) -> None:
        """End the other process."""
        ...


class Mooncake:
    """Mooncake Store over TCP: a master, a process that owns the memory, and this one that reads."""

    def __init__(self) -> None:
        self._store_module = importlib.import_module("mooncake.store")
        self._numpy = importlib.import_module("numpy")
        port, metrics = _free_port(), _free_port()
        master = str(Path(str(self._store_module.__file__)).with_name("mooncake_master"))
        ports = [f"--rpc_port={port}", f"--metrics_port={metrics}"]
        self._processes = [_start([master, *ports])]
        _wait_for_port(port)
        self._address = f"127.0.0.1:{port}"
        self._processes.append(_start([sys.executable, "-m", __spec__.name, "own", self._address]))
        assert self._processes[1].stdout is not None
        self._processes[1].stdout.readline()
        self._store = mooncake_store(self._store_module, self._address, owned=0)
        self._buffer = self._numpy.zeros(0, self._numpy.uint8)
        self._nbytes = 0

    def fill(self, blocks: list[bytes]) -> None:
        """Acknowledged by `put` itself."""
        for number, block in enumerate(blocks):
            if self._store.put(f"{len(block)}/{number}", block):
                raise RuntimeError(f"put {number} failed")
        self._nbytes = len(blocks[0])
        self._buffer = self._numpy.zeros(len(blocks) * self._nbytes, self._numpy.uint8)
        self._store.register_buffer(self._buffer.ctypes.data, self._buffer.nbytes)

    def get(self, block: int) -> memoryview:
        """`get_into` memory that is registered."""
        nbytes, start = self._nbytes, block * self._nbytes
        if self._store.get_into(f"{nbytes}/{block}", self._buffer.ctypes.data + start, nbytes) != nbytes:
            raise RuntimeError(f"get {block} failed")
        return memoryview(self._buffer[start : start + nbytes])

    def close(self) -> None:
        """End both."""
        self._store.close()
        _end(self._processes)


def mooncake_store(module: Any, address: str, *, owned: int) -> Any:
    """A store client with so many bytes of memory for blocks of others."""
    store = module.MooncakeDistributedStore()
    if store.setup("127.0.0.1", "P2PHANDSHAKE", owned, 64 << 20, "tcp", "", address):
        raise RuntimeError("Mooncake's setup failed")
    return store


class LMCache:
    """The LMCache server, spoken to with LMCache's own messages, without Nagle's delay."""

    def __init__(self) -> None:
        self._protocol = importlib.import_module("lmcache.v1.protocol")
        self._formats = importlib.import_module("lmcache.v1.memory_management").MemoryFormat
        self._keys = importlib.import_module("lmcache.utils").CacheEngineKey
        self._torch = importlib.import_module("torch")
        port = _free_port()
        server = [sys.executable, "-m", "lmcache.v1.server", "127.0.0.1", str(port)]
        self._processes = [_start(server)]
        _wait_for_port(port)
        self._sock = socket.create_connection(("127.0.0.1", port))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = memoryview(bytearray(0))
        self._nbytes = 0

    def fill(self, blocks: list[bytes]) -> None:
        """Its puts are not acknowledged: asked for until they are there."""
        commands = self._protocol.ClientCommand
        self._nbytes = len(blocks[0])
        self._buffer = memoryview(bytearray(len(blocks) * self._nbytes))
        for number, block in enumerate(blocks):
            self._sock.sendall(self._message(commands.PUT, number, len(block)) + block)
            self._sock.sendall(self._message(commands.EXIST, number, 0))
            if self._answer().code != self._protocol.ServerReturnCode.SUCCESS:
                raise RuntimeError(f"put {number} failed")

    def get(self, block: int) -> memoryview:
        """As its connector does it."""
        self._sock.sendall(self._message(self._protocol.ClientCommand.GET, block, 0))
        if self._answer().length != self._nbytes:
            raise RuntimeError(f"get {block} failed")
        into = self._buffer[block * self._nbytes : (block + 1) * self._nbytes]
        self._receive(into)
        return into

    def close(self) -> None:
        """End it."""
        self._sock.close()
        _end(self._processes)

    def _message(self, command: Any, number: int, length: int) -> bytes:
        key = self._keys("bench", 1, 0, self._nbytes + number, self._torch.uint8)
        shape = self._torch.Size([length, 0, 0, 0])
        message = self._protocol.ClientMetaMessage(
            command, key, length, self._formats(1), self._torch.uint8, shape
        )
        packed: bytes = message.serialize()
        return packed

    def _answer(self) -> Any:
        data = memoryview(bytearray(self._protocol.ServerMetaMessage.packlength()))
        self._receive(data)
        return self._protocol.ServerMetaMessage.deserialize(bytes(data))

    def _receive(self, into: memoryview) -> None:
        while into:
            into = into[self._sock.recv_into(into) :]


class StoreAnswers:
    """Answers questions about one store."""

    def __init__(self, peer: StorePeer) -> None:
        self._peer = peer
        self._filled: tuple[int, int] | None = None

    def get(self, mib: int, blocks: int) -> dict[str, Any]:
        """Seconds to get so many blocks, one after the other."""
        if self._filled != (mib, blocks):
            self._peer.fill([os.urandom(mib << 20) for _ in range(blocks)])
            self._filled = mib, blocks
        started = time.perf_counter()
        for block in range(blocks):
            self._peer.get(block)
        return {"seconds": time.perf_counter() - started}


def _own(address: str) -> None:
    """The process that owns Mooncake's blocks: alive until the pipe closes."""
    store = mooncake_store(importlib.import_module("mooncake.store"), address, owned=512 << 20)
    print("ready", flush=True)
    sys.stdin.read()
    store.close()


def _start(command: list[str]) -> "subprocess.Popen[bytes]":
    if shutil.which(command[0]) is None:
        raise RuntimeError(f"{command[0]} is not there")
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        preexec_fn=_end_with_parent,
    )  # fmt: skip


def _end_with_parent() -> None:
    """The bench kills this process; what it started must not stay."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end(processes: "list[subprocess.Popen[bytes]]") -> None:
    for process in reversed(processes):
        process.terminate()
        process.wait(20)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def _wait_for_port(port: int) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


STORES: dict[str, Callable[[], StorePeer]] = {"mooncake": Mooncake, "lmcache": LMCache}


def main() -> None:
    """Arguments: the store. What it prints goes to stderr, the pipe stays clean."""
    if sys.argv[1] == "own":
        _own(sys.argv[2])
        return
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    peer = STORES[sys.argv[1]]()
    try:
        serve({"get": StoreAnswers(peer).get}, sys.stdin.buffer, answers)
    finally:
        peer.close()


if __name__ == "__main__":
    main()
