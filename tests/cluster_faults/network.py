"""The network between nodes of a test: every connection goes through here, to be cut, slowed or stalled.

Node k listens on 127.77.0.k and advertises 127.78.0.k. There this process listens on the same ports, finds
out from the kernel which node calls (the socket at the other end belongs to one of their processes), and
passes bytes on by the rule for that pair of nodes: both directions, but only of connections that one opened.

Threads: one of its own, with an asyncio loop; every method may be called from any other.
"""

import asyncio
import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

_CHUNK_NBYTES = 64 << 10
_CALL_LIMIT_S = 20.0
_LINGER_NOTHING = struct.pack("ii", 1, 0)


class Way(Enum):
    """What happens to the bytes of a connection."""

    PASS = "pass"
    SLOW = "slow"
    STALL = "stall"
    """It is accepted, and nothing moves."""
    CUT = "cut"
    """It is reset, and so is every new one."""


@dataclass(frozen=True, slots=True)
class Rule:
    """`delay_s` and `bytes_per_s` are those of a slow way."""

    way: Way = Way.PASS
    delay_s: float = 0.0
    bytes_per_s: float = float("inf")


FREE = Rule()


def real_host(number: int) -> str:
    """Where node `number` (from 1) listens."""
    return f"127.77.0.{number}"


def front_host(number: int) -> str:
    """What its peers dial."""
    return f"127.78.0.{number}"


class Network:
    """The fronts of all nodes. `pids` tells which process is which node right now."""

    def __init__(self, pids: Callable[[], Mapping[int, int]]) -> None:
        self._pids = pids
        self._rules: dict[tuple[int, int], Rule] = {}
        self._fronts: dict[int, dict[int, asyncio.Server]] = {}
        self._links: set[_Link] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="network", daemon=True)
        self._thread.start()
        self._changed = asyncio.Event()
        """Set, and replaced by another one, with every change of the rules."""
        self._handlers: set[asyncio.Task[None]] = set()
        self.strangers = 0
        """Connections of processes that are no node (any more)."""

    def publish(self, node: int, ports: list[int]) -> None:
        """Node `node` listens on these ports now, and on no others."""
        self._call(self._publish(node, ports))

    def rule(self, source: int, target: int, rule: Rule) -> None:
        """From now on, for connections that `source` opens to `target`, both directions of their bytes."""
        self._call(self._set({(source, target): rule}))

    def heal(self) -> None:
        """Everything passes again; connections that were cut stay closed."""
        self._call(self._set(dict.fromkeys(self._rules, FREE)))

    def close(self) -> None:
        """Reset what is open and stop listening."""
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CALL_LIMIT_S)
        self._loop.close()

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(_CALL_LIMIT_S)

    async def _publish(self, node: int, ports: list[int]) -> None:
        fronts = self._fronts.setdefault(node, {})
        for port in set(fronts) - set(ports):
            fronts.pop(port).close()
        for port in set(ports) - set(fronts):

            async def accept(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int = port
            ) -> None:
                await self._accept(node, port, reader, writer)

            fronts[port] = await asyncio.start_server(accept, front_host(node), port)

    async def _set(self, rules: Mapping[tuple[int, int], Rule]) -> None:
        self._rules.update(rules)
        for link in list(self._links):
            if self.between(link).way is Way.CUT:
                link.reset()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _close(self) -> None:
        for fronts in self._fronts.values():
            for server in fronts.values():
                server.close()
        for link in list(self._links):
            link.reset()
        await asyncio.gather(*self._handlers, return_exceptions=True)

    def between(self, link: "_Link") -> Rule:
        """The rule for a connection, now."""
        return self._rules.get((link.source, link.target), FREE)

    async def _accept(
        self, target: int, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        handler = asyncio.current_task()
        assert handler is not None
        self._handlers.add(handler)
        handler.add_done_callback(self._handlers.discard)
        peer, here = writer.get_extra_info("peername"), writer.get_extra_info("sockname")
        # the kernel takes many milliseconds to list its sockets: other connections go on meanwhile
        source = await asyncio.to_thread(node_behind, peer, here, self._pids())
        if source is None:
            self.strangers += 1
        link = _Link(source or 0, target, writer)
        self._links.add(link)
        try:
            await self._serve(link, port, reader)
        finally:
            link.reset()
            self._links.discard(link)

    async def _serve(self, link: "_Link", port: int, reader: asyncio.StreamReader) -> None:
        if self.between(link).way is Way.CUT:
            return
        try:
            inner, back = await asyncio.open_connection(real_host(link.target), port)
        except OSError:
            return  # as if nobody listened
        link.writers.append(back)
        pumps = [
            asyncio.create_task(self._pump(link, reader, back)),
            asyncio.create_task(self._pump(link, inner, link.writers[0])),
        ]
        link.tasks += pumps
        await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(
        self, link: "_Link", reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """One direction, until it ends."""
        try:
            while chunk := await reader.read(_CHUNK_NBYTES):
                await self._wait(link, len(chunk))
                writer.write(chunk)
                await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()
        except OSError:
            link.reset()

    async def _wait(self, link: "_Link", nbytes: int) -> None:
        while self.between(link).way is Way.STALL:
            await self._changed.wait()
        rule = self.between(link)
        if rule.way is Way.SLOW:
            await asyncio.sleep(rule.delay_s + nbytes / rule.bytes_per_s)


class _Link:
    """One connection between two nodes, through us."""

    def __init__(self, source: int, target: int, writer: asyncio.StreamWriter) -> None:
        self.source = source
        self.target = target
        self.writers = [writer]
        self.tasks: list[asyncio.Task[None]] = []

    def reset(self) -> None:
        """End it with a reset on both sides."""
        for writer in self.writers:
            if not writer.transport.is_closing():
                _reset_on_close(writer)
                writer.transport.abort()
        for task in self.tasks:
            task.cancel()


def _reset_on_close(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOTHING)


def node_behind(
    peer: tuple[str, int], here: tuple[str, int], pids: Mapping[int, int], proc: Path = Path("/proc")
) -> int | None:
    """Which node's process has the other end of a connection; `pids`: node → process id."""
    ends = (_hex(peer), _hex(here))
    for local, remote, _, inode in _sockets(proc):
        if (local, remote) == ends:
            return next((node for node, pid in pids.items() if _has(proc / str(pid), inode)), None)
    return None


def listening_ports(pid: int, host: str, proc: Path = Path("/proc")) -> list[int]:
    """Ports of `host` that a process listens on."""
    return sorted(
        int(local.rpartition(":")[2], 16)
        for local, _, state, inode in _sockets(proc)
        if state == _LISTENS and local.startswith(_hex((host, 0))[:9]) and _has(proc / str(pid), inode)
    )


_LISTENS = "0A"


def _sockets(proc: Path) -> Iterator[tuple[str, str, str, str]]:
    """Local and remote end, state and inode of every TCP socket; IPv4 ends alike in both tables."""
    for table in ("tcp", "tcp6"):
        for line in (proc / "net" / table).read_text().splitlines()[1:]:
            words = line.split()
            yield words[1][-13:], words[2][-13:], words[3], f"socket:[{words[9]}]"


def _hex(address: tuple[str, int]) -> str:
    """As /proc/net/tcp has it, on a little-endian machine."""
    return f"{socket.inet_aton(address[0])[::-1].hex().upper()}:{address[1]:04X}"


def _has(process: Path, link: str) -> bool:
    with contextlib.suppress(OSError):
        for entry in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(entry) == link:
                    return True
    return False
