"""A process that serves from its own arena and does as it is told, one line at a time; started by Peer."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from cachemgr import BlockFormat, HostCache
from cachemgr.arena_files import geometry_digest
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
        self.say(*words)
        return self._hear()

    def say(self, *words: object) -> None:
        """Say a command whose answer nobody waits for."""
        assert self._process.stdin
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._end()

    def close(self) -> None:
        """Let it end by itself: it closes its cache."""
        assert self._process.stdin
        if not self._process.stdin.closed:
            self._end()

    def _end(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def _hear(self) -> int:
        assert self._process.stdout
        return int(self._process.stdout.readline())


def fill_peer(cache: HostCache, blocks: int, *, seed: int, first: int = 0) -> int:
    """Commit blocks first … of a chain; how many were written."""
    hashes, written = chain(cache, blocks, seed=seed), 0
    for index in range(first, blocks):
        pending = cache.prepare(hashes, index)
        if pending is not None:
            pending.payload[:] = payload_of(hashes[index], PEER_FORMAT)
            cache.commit(pending)
            written += 1
    return written


def churn(cache: HostCache, *, seeds: int, blocks: int) -> Iterator[int]:
    """Write chain after chain through too few slots, for ever."""
    while True:
        for seed in range(seeds):
            yield fill_peer(cache, blocks, seed=seed)


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
            for _ in churn(cache, seeds=values[0], blocks=values[1]):
                pass
    host.close()


if __name__ == "__main__":
    assert geometry_digest(PEER_FORMAT)
    main(*sys.argv[1:])
