"""The demo: what one server computed the others restore, also when it is gone, and it comes back warm.

    1  a long prompt on the first server: computed
    2  the same on every other server: restored from the first one's blocks, same text, sooner
    3  a second prompt on the first server alone; once its copies are with their owners, the first is killed
    4  the second prompt on the others: restored without the server that computed it, some of it over the wire
    5  the first server again: restored from the arena that its dead process left

Each prompt has a salt of its own, so nothing an earlier run left can make it warm.
"""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from scripts.cluster.figures import copies_waiting, fetched_blocks, given_blocks
from scripts.cluster.node import NodeServer
from scripts.cluster.running import bring_up
from scripts.console import say, seconds_text, show_table, working
from scripts.demo_prompt import demo_messages
from scripts.errors import RejectedError
from scripts.interruption import Interruption
from scripts.streamed_answer import StreamedAnswer

MAX_TOKENS = 32
_SETTLE_LIMIT_S = 30.0
_LOOK_EVERY_S = 0.1
_QUIET_S = 1.0
_TRIES = 3
_BLOCK_TOKENS = 32
_COLUMNS = ("step", "server", "tokens", "cached", "from peers", "first token", "same text")


@dataclass(frozen=True, slots=True)
class Step:
    """One request of the demo and what came of it. `fetched`: blocks that came from other nodes for it."""

    what: str
    server: str
    answer: StreamedAnswer
    fetched: float
    cold: StreamedAnswer | None = None
    """The first answer to this prompt; None if this is it."""

    def trouble(self) -> str:
        """Empty if it held, else one line."""
        cold, answer = self.cold, self.answer
        at = f"{self.what} ({self.server})"
        if not answer.text:
            return f"{at}: the answer is empty"
        if cold is None:
            return f"{at}: cached tokens {answer.cached_tokens}, expected 0" if answer.cached_tokens else ""
        if answer.text != cold.text:
            return f"{at}: the text differs: first {cold.text!r}, then {answer.text!r}"
        if answer.cached_tokens == 0:
            return f"{at}: nothing was restored"
        if not answer.ttft_s < cold.ttft_s:
            slow, fast = seconds_text(answer.ttft_s), seconds_text(cold.ttft_s)
            return f"{at}: restored, and not sooner: {slow} after {fast}"
        return ""

    def row(self) -> tuple[str, ...]:
        """Its cells in the table."""
        answer, same = self.answer, "" if self.cold is None else "no"
        if self.cold is not None and answer.text == self.cold.text:
            same = "yes"
        return (
            self.what, self.server, str(answer.input_tokens), str(answer.cached_tokens),
            f"{self.fetched:.0f}", seconds_text(answer.ttft_s), same,
        )  # fmt: skip


@dataclass(slots=True)
class Demo:
    """The steps taken so far on `servers`; `pause` waits, and may end it all."""

    servers: Sequence[NodeServer]
    model: str
    pause: Callable[[float], None]
    steps: list[Step] = field(default_factory=list)

    def ask(self, what: str, server: NodeServer, salt: str, *, cold: StreamedAnswer | None = None) -> Step:
        """Send the prompt of this salt to a server and note what came."""
        from scripts.triton_stream import stream_answer  # late: other verbs should not wait for tritonclient

        request: dict[str, object] = {
            "messages": demo_messages(), "max_tokens": MAX_TOKENS, "stream": True, "cache_salt": salt,
        }  # fmt: skip
        before = fetched_blocks(server.http)
        with working(f"{what}: {server.plan.id}"):
            answer = stream_answer(server.grpc_url, self.model, request)
        step = Step(what, server.plan.id, answer, fetched_blocks(server.http) - before, cold)
        self.steps.append(step)
        return step

    def wait_until(self, condition: Callable[[], bool], *, what: str) -> None:
        """Poll; RejectedError once it takes too long."""
        deadline = time.monotonic() + _SETTLE_LIMIT_S
        while not condition():
            if time.monotonic() > deadline:
                raise RejectedError(f"{what} took longer than {_SETTLE_LIMIT_S:g} s")
            self.pause(_LOOK_EVERY_S)


def show(servers: Sequence[NodeServer], *, model: str, interruption: Interruption) -> None:
    """All steps, then the table of them; RejectedError for the first that did not hold."""
    demo = Demo(servers, model, interruption.pause)
    try:
        _take_steps(demo, interruption)
    finally:
        if demo.steps:
            show_table("one prompt, several servers", _COLUMNS, [step.row() for step in demo.steps])
    judge(demo.steps)
    say("every answer is the same, and each but those computed was restored")


def _take_steps(demo: Demo, interruption: Interruption) -> None:
    first, *others = demo.servers
    one = secrets.token_hex(8)
    cold = demo.ask("computed", first, one).answer
    _wait_for_copies(demo)
    for server in others:
        demo.ask("restored", server, one, cold=cold)
    two, second = _second_prompt(demo)
    with working(f"kill {first.plan.id} with SIGKILL"):
        first.kill()
    for server in others:
        demo.ask(f"without {first.plan.id}", server, two, cold=second)
    with working(f"bring {first.plan.id} back"):
        bring_up([first], interruption=interruption)
    for salt, before in ((one, cold), (two, second)):
        demo.ask("back, and warm", first, salt, cold=before)


def _second_prompt(demo: Demo) -> tuple[str, StreamedAnswer]:
    """A prompt that only the first server was asked, and a part of which is its own to keep.

    Without such a part the others would have copies of everything, and none would need another one's.
    """
    first = demo.servers[0]
    for _ in range(_TRIES):
        salt = secrets.token_hex(8)
        before = given_blocks(first.http)
        answer = demo.ask("second prompt", first, salt).answer
        _wait_for_copies(demo)
        if given_blocks(first.http) - before < 2 * (answer.input_tokens // _BLOCK_TOKENS):
            return salt, answer
    raise RejectedError(f"{first.plan.id} owns no part of any of {_TRIES} prompts: is it on the ring?")


def _wait_for_copies(demo: Demo) -> None:
    """Replication goes on in the background: nothing waits any more, and figures are a little old."""
    waited_at = time.monotonic()

    def settled() -> bool:
        nonlocal waited_at
        if any(copies_waiting(server.http) != 0 for server in demo.servers):
            waited_at = time.monotonic()
        return time.monotonic() > waited_at + _QUIET_S

    demo.wait_until(settled, what="giving the copies to their owners")


def judge(steps: Sequence[Step]) -> None:
    """RejectedError for the first step that did not hold, or if no block came from another node."""
    for step in steps:
        if trouble := step.trouble():
            raise RejectedError(trouble)
    for what in {step.what for step in steps if step.what.startswith("without")}:
        if not sum(step.fetched for step in steps if step.what == what):
            raise RejectedError(f"{what}: no block came from another node, so no replica was shown")
