"""One control connection to one node: greets it once, calls it, passes on what its replies say of the ring.

A connection is greeted before its first call, by one Hello that all calls wait for: it fixes the wire version
and makes sure that this is the node we mean. After the connection broke, the next call greets again.

A reply under a newer ring brings that ring along (wire version 2) or makes us ask for it (1). A reply under
an older ring makes us show ours. Both happen beside the calls, one exchange at a time.

Invariants
- A call ends by its deadline with a reply or a ControlTrouble. A slow Hello outlives the call that began it.
- Nothing is sent twice, but for a call that was refused for its wire version: greet again, send once more.

Threads: the IO thread.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from cachemgr.cluster.control.grpc_service import Channel
from cachemgr.cluster.control.messages import (
    HELLO,
    RING,
    WIRE_MAX,
    WIRE_MIN,
    HelloReply,
    HelloRequest,
    Method,
    Reply,
    Request,
    RingRequest,
    common_wire,
    encode_message,
)
from cachemgr.cluster.control.packed import MessageError
from cachemgr.cluster.control.trouble import ControlTrouble, Trouble
from cachemgr.cluster.rings import RingsInForce
from cachemgr.ring import NodeId, RingError, Version, decode_ring

Q = TypeVar("Q", bound=Request)
R = TypeVar("R", bound=Reply)

Connect = Callable[[str], Channel]
"""Makes a channel to host:port; nothing is sent before the first call."""

_log = logging.getLogger(__name__)


class ControlClient:
    """Calls `node` at `address`. `greeted`: what it answered to Hello, while that holds."""

    def __init__(
        self,
        node: NodeId,
        address: str,
        *,
        cluster: str,
        rings: RingsInForce,
        connect: Connect,
        call_s: float,
        wires: tuple[int, int] = (WIRE_MIN, WIRE_MAX),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node = node
        self._address = address
        self._cluster = cluster
        self._rings = rings
        self._connect = connect
        self._call_s = call_s
        self._wires = wires
        self._clock = clock
        self._channel = connect(address)
        self._hello: asyncio.Task[int] | None = None
        self._replaced: set[Channel] = set()
        self._beside: set[asyncio.Task[None]] = set()
        self._exchanging = False
        self._shown: Version | None = None
        self._closed = False
        self.greeted: HelloReply | None = None
        self.draining = False
        """As of its last reply."""
        self.unreadable_rings = 0

    async def call(self, method: Method[Q, R], request: Q, *, deadline: float) -> R:
        """The reply; ControlTrouble in trouble. `deadline`: of `clock`."""
        wire = await self._wire(deadline)
        try:
            return await self._send(method, request, wire, deadline)
        except ControlTrouble as trouble:
            if trouble.kind is not Trouble.WIRE:
                raise
        self._hello = self.greeted = None  # it was replaced by another release behind this connection
        return await self._send(method, request, await self._wire(deadline), deadline)

    async def greet(self, *, deadline: float) -> None:
        """Hello again, over a new connection; ControlTrouble in trouble."""
        self._let_go_channel()
        self._channel = self._connect(self._address)
        self._hello = self.greeted = None
        await self._wire(deadline)

    async def exchange_ring(self, *, deadline: float) -> Version:
        """Show our ring, take theirs if that is newer; the version they have then."""
        await self._wire(deadline)  # what we show is the ring of when it is sent
        request = RingRequest(state=self._rings.encoded)
        reply = await self.call(RING, request, deadline=deadline)
        if reply.state:
            self._install(reply.state)
        return reply.version

    async def close(self, grace_s: float = 0.0) -> None:
        """Let calls under way finish for `grace_s`. Idempotent."""
        self._closed = True
        tasks = [*self._beside, *([self._hello] if self._hello is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for channel in self._replaced:
            await channel.close()
        await self._channel.close(grace_s)

    async def _wire(self, deadline: float) -> int:
        if self._closed:
            raise ControlTrouble(Trouble.CLOSED, f"{self._node}: the connection is closed")
        hello = self._hello
        if hello is None or (hello.done() and (hello.cancelled() or hello.exception() is not None)):
            hello = self._hello = asyncio.create_task(self._say_hello(), name=f"hello-{self._node}")
            hello.add_done_callback(_look_at_end)
        if hello.done():
            return hello.result()
        left_s = max(deadline - self._clock(), 0.0)
        done, _ = await asyncio.wait({hello}, timeout=left_s)
        if not done:
            raise ControlTrouble(Trouble.DEADLINE, f"Hello: no answer of {self._node} in time")
        if hello.cancelled():
            raise ControlTrouble(Trouble.CLOSED, f"{self._node}: the connection is closed")
        return hello.result()

    async def _say_hello(self) -> int:
        request = HelloRequest(wire_min=self._wires[0], wire_max=self._wires[1])
        reply = await self._send(HELLO, request, 0, self._clock() + self._call_s)
        if reply.node != self._node:
            text = f"at {self._address} answers {reply.node or 'nobody'!r}, not {self._node}"
            raise ControlTrouble(Trouble.IDENTITY, text)
        wire = common_wire(reply.wire_min, reply.wire_max, ours=self._wires)
        if wire is None:
            low, high = self._wires
            text = f"speaks wire versions {reply.wire_min}..{reply.wire_max}, and we {low}..{high}"
            raise ControlTrouble(Trouble.WIRE, text)
        self.greeted = reply
        return wire

    async def _send(self, method: Method[Q, R], request: Q, wire: int, deadline: float) -> R:
        request.wire, request.node, request.cluster = wire, self._rings.node, self._cluster
        request.epoch, request.digest = self._rings.version
        left_s = deadline - self._clock()
        if left_s <= 0:
            raise ControlTrouble(Trouble.DEADLINE, f"{method.name}: no time left")
        try:
            data = await self._channel.call(method.name, encode_message(request), timeout_s=left_s)
            reply = method.decode_reply(data)
        except MessageError as error:
            raise ControlTrouble(Trouble.GARBAGE, str(error)) from None
        except ControlTrouble as trouble:
            if trouble.kind in (Trouble.LOST, Trouble.REFUSED) and method is not HELLO:
                self._hello = self.greeted = None
            if trouble.kind is Trouble.BUSY and self._shown != self._rings.version:
                self._exchange(method)  # it may not know yet that we are on the ring
            raise
        self._learn(method, reply)
        return reply

    def _learn(self, method: Method[Any, Any], reply: Reply) -> None:
        self.draining = reply.draining
        if reply.ring:
            self._install(reply.ring)
        ours = self._rings.version
        behind = reply.version < ours and self._shown != ours  # shown once, theirs to take
        if reply.version > ours or behind:
            self._exchange(method)

    def _exchange(self, after: Method[Any, Any]) -> None:
        if after is HELLO or after is RING or self._exchanging or self._closed:
            return
        self._shown = self._rings.version
        self._exchanging = True
        self._go(self._exchange_beside())

    def _install(self, encoded: bytes) -> None:
        """A ring we cannot read may be a newer release's: no reason to fail the call that brought it."""
        try:
            self._rings.install(decode_ring(encoded))
        except RingError as error:
            if not self.unreadable_rings:
                _log.warning("peer %s has a ring that cannot be read here: %s", self._node, error)
            self.unreadable_rings += 1

    async def _exchange_beside(self) -> None:
        try:
            await self.exchange_ring(deadline=self._clock() + self._call_s)
        except ControlTrouble as trouble:
            _log.debug("no exchange of rings with %s: %s", self._node, trouble)
            self._shown = None  # the next reply begins another
        finally:
            self._exchanging = False

    def _let_go_channel(self) -> None:
        """Calls under way get the time that any call has."""
        self._replaced.add(self._channel)
        self._go(self._close_replaced(self._channel))

    async def _close_replaced(self, channel: Channel) -> None:
        await channel.close(self._call_s)
        self._replaced.discard(channel)

    def _go(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)


def _look_at_end(task: asyncio.Task[int]) -> None:
    """Its waiters may all be gone: what it failed with was then nobody's call."""
    if not task.cancelled():
        task.exception()
