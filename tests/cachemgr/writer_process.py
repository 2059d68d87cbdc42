"""A process that opens the cache and writes until it is killed; started by WriterProcess, once per `go` line.

A fork of this small process is a new writer in milliseconds, a new interpreter takes half a second.
"""

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

from cachemgr import BlockFormat, CacheSettings, open_cache
from tests.cachemgr.host import SECRETS, Host, chain, payload_of

BIG_FORMAT = BlockFormat(b"identity of test", "float32", layers=4, kv_heads=4, head_dim=64, block_tokens=4)
CHAINS, LENGTH, ROOM = 4, 12, 32


class WriterProcess:
    """Runs writers, one at a time, on the directory of `host`."""

    def __init__(self, host: Host, *, arena_bytes: int | None = None) -> None:
        root = Path(__file__).resolve().parents[2]
        command = [
            sys.executable,
            "-m",
            "tests.cachemgr.writer_process",
            str(host.directory),
            str(arena_bytes or ""),
        ]
        pipe = subprocess.PIPE
        self._nursery = subprocess.Popen(command, cwd=root, stdin=pipe, stdout=pipe, text=True)
        assert self._nursery.stdin
        assert self._nursery.stdout
        self._say, self._hear = self._nursery.stdin, self._nursery.stdout

    def start(self) -> int:
        """Start a writer; its process id, once it holds its arena and writes."""
        self._say.write("go\n")
        self._say.flush()
        return int(self._hear.readline())

    def wait(self) -> int:
        """Wait for the writer's end; its exit code, negative if it was a signal."""
        return int(self._hear.readline())

    def close(self) -> None:
        self._say.close()
        assert self._nursery.wait(30) == 0
        self._hear.close()


def write_forever(settings: CacheSettings) -> None:
    cache = open_cache(BIG_FORMAT, settings, SECRETS)
    chains = [chain(cache, LENGTH, seed=seed) for seed in range(CHAINS)]
    round_ = 0
    while True:
        for hashes in chains:
            for index in range(LENGTH):
                pending = cache.prepare(hashes, index)
                if pending is not None:
                    pending.payload[:] = payload_of(hashes[index], BIG_FORMAT)
                    cache.commit(pending)
        round_ += 1
        if round_ == 1:
            print(os.getpid(), flush=True)


def die_with_parent() -> None:
    """A test run that is killed leaves no writer behind."""
    pr_set_pdeathsig = 1
    assert ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL) == 0


def main(directory: str, arena_bytes: str) -> None:
    die_with_parent()
    settings = Host(Path(directory)).settings(
        blocks=ROOM, block_format=BIG_FORMAT, arena_bytes=int(arena_bytes) if arena_bytes else None
    )
    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            die_with_parent()
            write_forever(settings)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
