"""The watchdog against threads that are played, and then with a real replies thread: no real waiting."""

import threading
from dataclasses import dataclass, field

import pytest

from backend.errors import BackendStuck
from backend.generation import Delta, FinishReason, Usage
from backend.replies import Replies
from backend.watchdog import JOB_TIMES, LOOK_EVERY_S, Watchdog, place_of
from tests.backend.service_rig import Caller

LIMIT_S = 4.0
WAIT_S = 20.0


@dataclass
class PlayedThread:
    name: str
    ident: int | None = None
    alive: bool = True

    def is_alive(self) -> bool:
        return self.alive


@dataclass
class PlayedLoop:
    thread: PlayedThread = field(default_factory=lambda: PlayedThread("step-loop", threading.get_ident()))
    heartbeat: float = 0.0
    job_since: float | None = None


@dataclass
class PlayedReplies:
    thread: PlayedThread = field(default_factory=lambda: PlayedThread("replies"))
    heartbeat: float = 0.0
    heard: list[str] = field(default_factory=list)

    def fail_open(self, error: Exception) -> None:
        self.heard.append(str(error))

    def reopen(self) -> None:
        self.heard.append("reopen")


class Rig:
    """A watchdog and its clock; `pass_time` looks as often as the real one does."""

    def __init__(self) -> None:
        self.now = 100.0
        self.loop = PlayedLoop()
        self.replies = PlayedReplies()
        self.dog = Watchdog(self.loop, self.replies, limit_s=LIMIT_S, clock=lambda: self.now)

    def pass_time(self, seconds: float, *, moving: tuple[str, ...] = ("loop", "replies")) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += LOOK_EVERY_S
            for name in moving:
                getattr(self, name).heartbeat = self.now
            self.dog.look()

    def reading(self, name: str) -> float:
        return {reading.name: reading.value for reading in self.dog.readings()}[name]


@pytest.fixture
def rig():
    return Rig()


def test_a_loop_that_moves_is_left_alone_however_long(rig, caplog):
    rig.pass_time(60)
    assert rig.dog.problem is None
    assert rig.replies.heard == []
    assert caplog.text == ""
    assert rig.reading("heartbeats_total") == 60 / LOOK_EVERY_S


def test_steps_and_idle_beats_shorter_than_the_limit_are_no_stall(rig):
    for _ in range(10):
        rig.pass_time(LIMIT_S - LOOK_EVERY_S, moving=("replies",))
        rig.pass_time(LOOK_EVERY_S)
    assert rig.dog.problem is None
    assert rig.reading("step_loop_stalls_total") == 0


def test_a_loop_without_a_turn_is_stuck_within_five_seconds_and_said_so_once(rig, caplog):
    rig.pass_time(1)
    rig.pass_time(4.75, moving=("replies",))
    error = rig.dog.problem
    assert isinstance(error, BackendStuck)
    assert str(error) == "the backend is stuck: step-loop hangs (limit 4 s), silent for 4.8 s"
    rig.pass_time(30, moving=("replies",))
    assert str(rig.dog.problem).endswith("silent for 34.8 s")
    assert len(rig.replies.heard) == 1
    assert rig.replies.heard[0].startswith("the backend is stuck: step-loop hangs")
    assert (rig.reading("step_loop_stalls_total"), rig.reading("step_loop_stuck")) == (1, 1)
    (record,) = caplog.records
    assert record.getMessage().startswith("step-loop hangs (limit 4 s), at ")
    assert "pass_time" in record.getMessage(), "the line does not say where it hangs"
    assert "\n" not in record.getMessage()


def test_heartbeats_stand_still_while_anything_is_wrong(rig):
    rig.pass_time(10, moving=("replies",))
    before = rig.reading("heartbeats_total")
    rig.pass_time(10, moving=("replies",))
    assert rig.reading("heartbeats_total") == before


def test_a_loop_that_comes_back_is_ready_again_and_can_hang_again(rig, caplog):
    rig.pass_time(6, moving=("replies",))
    rig.pass_time(1)
    assert rig.dog.problem is None
    assert rig.replies.heard[1:] == ["reopen"]
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    assert "moves again" in caplog.records[1].getMessage()
    rig.pass_time(6, moving=("replies",))
    assert rig.dog.problem is not None
    assert rig.reading("step_loop_stalls_total") == 2


def test_streams_may_stay_open_before_new_requests_are_let_in(rig):
    rig.pass_time(6, moving=("replies",))
    seen = []
    rig.replies.reopen = lambda: seen.append(rig.dog.problem)
    rig.pass_time(1)
    assert [type(problem) for problem in seen] == [BackendStuck]


def test_new_requests_are_refused_before_open_streams_end(rig):
    seen = []
    rig.replies.fail_open = lambda error: seen.append(rig.dog.problem)
    rig.pass_time(6, moving=("replies",))
    assert [type(problem) for problem in seen] == [BackendStuck]


def test_a_loop_that_ended_unasked_is_dead_at_once(rig, caplog):
    rig.loop.thread.alive = False
    rig.pass_time(LOOK_EVERY_S)
    assert str(rig.dog.problem).startswith("the backend is stuck: step-loop has ended")
    assert len(rig.replies.heard) == 1
    rig.dog.expect_end()
    rig.pass_time(1)
    assert rig.dog.problem is not None, "closing does not make it well"
    assert len(caplog.records) == 1


def test_a_loop_that_was_told_to_end_is_not_dead(rig):
    rig.dog.expect_end()
    rig.loop.thread.alive = False
    rig.pass_time(10, moving=())
    assert rig.replies.heard == []


def test_a_loop_that_hangs_while_it_should_end_is_stuck(rig):
    rig.dog.expect_end()
    rig.pass_time(5, moving=("replies",))
    assert len(rig.replies.heard) == 1


def test_a_job_between_two_steps_may_take_longer_but_not_for_ever(rig):
    rig.loop.job_since = rig.now
    rig.pass_time(JOB_TIMES * LIMIT_S - LOOK_EVERY_S, moving=("replies",))
    assert rig.dog.problem is None
    rig.pass_time(1, moving=("replies",))
    assert "step-loop hangs (limit 12 s)" in str(rig.dog.problem)


def test_a_step_after_a_job_has_the_limit_of_a_step(rig):
    rig.loop.job_since = rig.now
    rig.pass_time(10, moving=("replies",))
    rig.loop.job_since = None
    rig.pass_time(LOOK_EVERY_S)
    rig.pass_time(5, moving=("replies",))
    assert "limit 4 s" in str(rig.dog.problem)


def test_a_process_that_was_stopped_and_continued_has_not_hung(rig):
    rig.pass_time(1)
    rig.now += 3600
    rig.dog.look()
    rig.pass_time(LOOK_EVERY_S)
    assert rig.dog.problem is None


def test_replies_that_hang_or_ended_make_unready_but_end_no_stream(rig, caplog):
    rig.pass_time(5, moving=("loop",))
    assert "replies hangs (limit 4 s)" in str(rig.dog.problem)
    assert rig.replies.heard == []
    assert rig.reading("step_loop_stalls_total") == 0
    rig.pass_time(1)
    assert rig.dog.problem is None
    rig.replies.thread.alive = False
    rig.pass_time(1)
    assert "replies has ended" in str(rig.dog.problem)
    assert len(caplog.records) == 3


def test_the_thread_looks_until_it_is_stopped():
    looked = threading.Event()

    class Looking(Watchdog):
        def look(self) -> None:
            looked.set()
            raise RuntimeError("a look that fails is not the last")

    dog = Looking(PlayedLoop(), PlayedReplies(), limit_s=LIMIT_S, clock=lambda: 0.0)
    dog.start()
    assert looked.wait(WAIT_S)
    looked.clear()
    assert looked.wait(WAIT_S)
    dog.stop()
    dog.stop()


def test_a_place_is_the_innermost_calls_of_a_thread():
    inside, leave = threading.Event(), threading.Event()

    def engine_call():
        inside.set()
        leave.wait(WAIT_S)

    thread = threading.Thread(target=engine_call)
    thread.start()
    assert inside.wait(WAIT_S)
    place = place_of(thread)
    leave.set()
    thread.join()
    assert " engine_call < threading.py" in place
    assert place_of(thread) == "nowhere any more"


def test_open_streams_end_once_and_what_a_reviving_loop_says_of_them_is_dropped():
    now = [0.0]
    cancelled: list[int] = []
    ended = Delta(finish=FinishReason.CANCELLED, usage=Usage(1, 0, 0, 0.0))
    replies = Replies(cancel=cancelled.append, after_round=lambda: None, clock=lambda: now[0])
    loop = PlayedLoop()
    dog = Watchdog(loop, replies, limit_s=LIMIT_S, clock=lambda: now[0])

    def pass_time(seconds, *, moving):
        for _ in range(int(seconds / LOOK_EVERY_S)):
            now[0] += LOOK_EVERY_S
            replies.heartbeat = now[0]
            loop.heartbeat = now[0] if moving else loop.heartbeat
            dog.look()

    open_before, between, after = Caller(), Caller(), Caller()
    replies.start()
    one, other, third = (replies.open(caller) for caller in (open_before, between, after))
    replies.watch(one, 1)
    replies.deliver([(one, Delta(text="words"))])
    assert open_before.first.wait(WAIT_S)
    pass_time(5, moving=False)
    assert isinstance(open_before.wait().last.error, BackendStuck)
    replies.watch(other, 2)  # it had passed the door before that was shut
    assert isinstance(between.wait().last.error, BackendStuck)
    pass_time(1, moving=True)
    replies.deliver([(one, Delta(text="late", token_ids=[9])), (other, Delta(text="late"))])
    replies.deliver([(one, ended), (other, ended)])
    replies.watch(third, 3)
    replies.deliver([(third, Delta(text="fine", finish=FinishReason.STOP, usage=Usage(1, 1, 0, 0.0)))])
    assert after.wait().text == "fine"
    replies.stop()
    assert (open_before.text, open_before.finals, between.finals) == ("words", 1, 1)
    assert cancelled == [1, 2]
