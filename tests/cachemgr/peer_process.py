"""A process that serves from its own arena and does as it is told, one line at a time; started by Peer."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

from cachemgr import BlockFormat, HostCache
from tests.cachemgr.host import Host, chain, payload_of

PEER_FORMAT = BlockFormat(b"identity of test", "float32", layers=4, kv_heads=4, head_dim=64, block_tokens=4)


class Peer:
    """Another process on the node of `host`."""

    def __init__(self, host: Host, *, blocks: int, **settings: int) -> None:
        root = Path(__file__).resolve().parents[2]
        arguments = [str(host.directory), str(blocks), *(f"{key}={value}" for key, value in settings.items())]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cachemgr.peer_process", *arguments],
            cwd=root, stdin=pipe, stdout=pipe, text=True,
        )  # fmt: skip
        self._hear()

    def ask(self, *words: object) -> int:
        """Say a command and wait for its answer."""
        assert self._process.stdin
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        return self._hear()

    def exit_code(self) -> int | None:
        """None while it lives; negative if it was a signal."""
        return self._process.poll()

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone. Nothing if it ended before."""
        self._process.kill()
        self.close()

    def close(self) -> None:
        """Let it end by itself: it closes its cache."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def _hear(self) -> int:
        assert self._process.stdout
        return int(self._process.stdout.readline())


def fill_peer(cache: HostCache, blocks: int, *, seed: int, block_format: BlockFormat = PEER_FORMAT) -> int:
    """Commit a chain of so many blocks; how many were written."""
    hashes, written = chain(cache, blocks, seed=seed), 0
    for index in range(blocks):
        pending = cache.prepare(hashes, index)
        if pending is not None:
            pending.payload[:] = payload_of(hashes[index], block_format)
            cache.commit(pending)
            written += 1
    return written


def churn(cache: HostCache, *, seeds: int, blocks: int) -> NoReturn:
    """Write chain after chain through too few slots, until killed."""
    while True:
        for seed in range(seeds):
            fill_peer(cache, blocks, seed=seed)


def main(directory: str, blocks: str, *settings: str) -> None:
    others = {key: int(value) for key, value in (setting.split("=") for setting in settings)}
    host = Host(Path(directory))
    host.clock = time.monotonic  # type: ignore[assignment]  # real time: this is a real process
    cache = host.open(blocks=int(blocks), block_format=PEER_FORMAT, **others)
    print(os.getpid(), flush=True)
    for line in sys.stdin:
        verb, *numbers = line.split()
        values = [int(number) for number in numbers]
        if verb == "fill":
            print(fill_peer(cache, values[1], seed=values[0]), flush=True)
        elif verb == "churn":
            print(0, flush=True)
            churn(cache, seeds=values[0], blocks=values[1])
    host.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
