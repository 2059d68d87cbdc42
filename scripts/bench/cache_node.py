"""A whole cache node without an engine, in a process of its own: owns blocks, and may read those of others.

    python -m scripts.bench.cache_node JSON

It says `ready`. Then each line that comes is a command, until the input ends: `blocks` is answered by how
many it holds; `read NAME NAME …` (hex) has it fetch that chain again and again, and forget it each time.
"""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec

from cachemgr import (
    BlockFormat,
    BlockHash,
    CacheSecrets,
    CacheSettings,
    ClusterSettings,
    HostCache,
    RemoteTiers,
    open_cache,
)
from cachemgr.host_contract import HostStore
from cachemgr.joining import open_beyond

_ROOT = Path(__file__).resolve().parents[2]
_READ_S = 5.0
_CLOSE_S = 30.0


class NodeOptions(msgspec.Struct, frozen=True):
    """All that a node is opened with; `secrets` is a folder."""

    cache: CacheSettings
    format: BlockFormat
    cluster: ClusterSettings
    secrets: str


class OpenNode:
    """A cache and its node of the cluster."""

    def __init__(self, options: NodeOptions) -> None:
        self.cluster = open_beyond(options.cache, options.cluster)
        self._stores: list[HostStore] = []
        secrets = CacheSecrets.load(Path(options.secrets))
        self.cache: HostCache = open_cache(options.format, options.cache, secrets, remote=self._remote)

    @property
    def store(self) -> HostStore:
        """The host tier as other nodes see it."""
        return self._stores[0]

    def fetch(self, names: Sequence[BlockHash]) -> int:
        """Bring a chain into the host tier; how much of it is known then."""
        lease = self.cache.acquire(names, deadline=time.monotonic() + _READ_S)
        while not lease.ready:
            time.sleep(0.0005)
        blocks = lease.blocks
        lease.release()
        return blocks

    def close(self) -> None:
        """The cache first."""
        self.cache.close()
        self.cluster.close()

    def _remote(self, store: HostStore) -> RemoteTiers:
        self._stores.append(store)
        return self.cluster.tiers(store)


class NodeProcess:
    """An OpenNode in another process."""

    def __init__(self, options: NodeOptions) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "scripts.bench.cache_node", msgspec.json.encode(options).decode()],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT,
        )  # fmt: skip
        if self._line() != "ready":
            raise RuntimeError("a cache node did not start")

    @property
    def blocks(self) -> int:
        """How many it holds."""
        self._tell("blocks")
        return int(self._line())

    def keep_reading(self, names: Sequence[BlockHash]) -> None:
        """From now on it fetches this chain again and again."""
        self._tell("read " + " ".join(name.hex() for name in names))

    def close(self) -> None:
        """End it and wait for that."""
        self._pipe(self._process.stdin).close()
        try:
            self._process.wait(_CLOSE_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._pipe(self._process.stdout).close()

    def _tell(self, line: str) -> None:
        pipe = self._pipe(self._process.stdin)
        pipe.write(line + "\n")
        pipe.flush()

    def _line(self) -> str:
        return self._pipe(self._process.stdout).readline().strip()

    def _pipe(self, pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe


@contextmanager
def node_processes(options: Sequence[NodeOptions]) -> Iterator[list[NodeProcess]]:
    """One process each, all ended on the way out."""
    started: list[NodeProcess] = []
    try:
        for one in options:
            started.append(NodeProcess(one))
        yield started
    finally:
        for process in started:
            process.close()


def main() -> None:
    """Serve until the input ends."""
    node = OpenNode(msgspec.json.decode(sys.argv[1], type=NodeOptions))
    ended = threading.Event()
    try:
        print("ready", flush=True)
        for line in sys.stdin:
            command, *words = line.split()
            if command == "blocks":
                print(node.store.blocks, flush=True)
            elif command == "read":
                names = [BlockHash(bytes.fromhex(word)) for word in words]
                threading.Thread(target=_read_on, args=(node, names, ended), daemon=True).start()
    finally:
        ended.set()
        node.close()


def _read_on(node: OpenNode, names: Sequence[BlockHash], ended: threading.Event) -> None:
    while not ended.is_set():
        node.fetch(names)
        node.store.drop(names)


if __name__ == "__main__":
    main()
