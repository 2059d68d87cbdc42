"""A real redis-server on a free loopback port, for tests: paused, continued, killed, started anew at will.

with RedisServer(tmp_path) as server: …          or the fixture `redis_server`
"""

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from tests.free_ports import free_ports
from tests.waiting import wait_until

BINARY = shutil.which("redis-server") or "/usr/bin/redis-server"


class RedisServer:
    """One server process without a disk: killed, it comes back empty, on the same port."""

    def __init__(self, folder: Path, *options: str, conf: Path | None = None) -> None:
        """`options` as redis-server takes them: `"--maxmemory", "2mb"`; they win over the file `conf`."""
        [self.port] = free_ports(1)
        self._folder = folder
        self._options = options
        self._conf = () if conf is None else (str(conf),)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Returns once it answers."""
        assert self._process is None
        fixed = ("--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no")
        log = self._folder / f"redis-{self.port}.log"
        files = ("--dir", str(self._folder), "--logfile", str(log))
        self._process = subprocess.Popen(
            [BINARY, *self._conf, *fixed, *files, *self._options], stdout=subprocess.DEVNULL
        )
        wait_until(self._answers)

    def kill(self) -> None:
        """SIGKILL: all that it held is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """SIGSTOP: it takes connections (the kernel does) and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def command(self, *words: str | bytes, password: str = "") -> bytes:
        """Ask it something beside the code under test: the raw first answer, errors included."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as door:
            if password:
                door.sendall(_encoded(("AUTH", password)))
                assert door.recv(1 << 16).startswith(b"+OK")
            door.sendall(_encoded(words))
            return _answer(door)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, "redis-server ended: see its log"
        try:
            return self.command("PING")[:1] in (b"+", b"-")  # NOAUTH is an answer, too
        except OSError:
            return False


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A running server; import it into a conftest."""
    with RedisServer(tmp_path) as server:
        yield server


def _encoded(words: tuple[str | bytes, ...]) -> bytes:
    parts = [word.encode() if isinstance(word, str) else word for word in words]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)


def _answer(door: socket.socket) -> bytes:
    """One status, error, number, or bulk string, without its frame for the last."""
    data, deadline = b"", time.monotonic() + 10
    while time.monotonic() < deadline:
        data += door.recv(1 << 16)
        head, found, rest = data.partition(b"\r\n")
        if not found:
            continue
        if head[:1] != b"$":
            return head if head[:1] != b"*" else data
        if (size := int(head[1:])) < 0 or len(rest) >= size + 2:
            return rest[: max(size, 0)]
    raise AssertionError("no whole answer within 10 s")
