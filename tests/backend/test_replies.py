import threading
import time

from backend.errors import Overloaded
from backend.generation import Delta, FinishReason, Usage
from backend.replies import Replies, merge
from tests.backend.service_rig import Caller
from tests.waiting import wait_until

WAIT_S = 20.0
END = {"finish": FinishReason.STOP, "usage": Usage(1, 2, 0, 0.1)}


def start(cancelled=None, after_round=lambda: None):
    replies = Replies(
        cancel=(cancelled if cancelled is not None else []).append,
        after_round=after_round,
        clock=time.monotonic,
    )
    replies.start()
    return replies


def test_deltas_arrive_in_order_and_final_once():
    replies = start()
    caller = Caller()
    stream = replies.open(caller)
    replies.watch(stream, 1)
    for i in range(50):
        replies.deliver([(stream, Delta(text=f"{i} ", token_ids=[i]))])
    replies.deliver([(stream, Delta(text="end", **END))])
    caller.wait()
    replies.stop()
    assert caller.text == "".join(f"{i} " for i in range(50)) + "end"
    assert caller.ids == list(range(50))
    assert caller.finals == 1
    assert caller.last.finish is FinishReason.STOP


def test_a_slow_caller_gets_merged_deltas_and_others_all_of_theirs():
    replies = start()
    entered, opened = threading.Event(), threading.Event()

    class Slow(Caller):
        def send(self, delta, *, final):
            entered.set()
            assert opened.wait(WAIT_S)
            super().send(delta, final=final)

    slow, quick = Slow(), Caller()
    one, other = replies.open(slow), replies.open(quick)
    replies.deliver([(one, Delta(text="a"))])
    assert entered.wait(WAIT_S)
    for letter in "bcdefgh":
        replies.deliver([(one, Delta(text=letter)), (other, Delta(text=letter))])
    replies.deliver([(one, Delta(**END)), (other, Delta(**END))])
    opened.set()
    slow.wait()
    quick.wait()
    replies.stop()
    assert (slow.text, len(slow.deltas)) == ("abcdefgh", 2)
    assert quick.text == "bcdefgh"


def test_merging_keeps_everything():
    merged = merge([Delta("a", [1], [-0.5]), Delta("", [2], [-1.5]), Delta("b", [3], [-2.5], **END)])
    assert merged == Delta("ab", [1, 2, 3], [-0.5, -1.5, -2.5], **END)


def test_a_caller_that_went_away_is_cancelled_once():
    cancelled: list[int] = []
    replies = start(cancelled)
    caller = Caller(gone=True)
    stream = replies.open(caller)
    replies.watch(stream, 7)
    wait_until(lambda: cancelled)
    for _ in range(3):
        replies.deliver([(stream, Delta(text="x"))])
    replies.deliver([(stream, Delta(finish=FinishReason.CANCELLED))])
    caller.wait()
    replies.stop()
    assert cancelled == [7]


def test_a_send_that_fails_cancels_and_harms_nobody_else(caplog):
    cancelled: list[int] = []
    replies = start(cancelled)

    class Broken(Caller):
        def send(self, delta, *, final):
            raise RuntimeError("the pipe is gone")

    broken, fine = replies.open(Broken()), Caller()
    other = replies.open(fine)
    replies.watch(broken, 3)
    replies.deliver([(broken, Delta(text="x")), (other, Delta(text="y", **END))])
    fine.wait()
    replies.stop()
    assert fine.text == "y"
    assert cancelled == [3]
    assert "the pipe is gone" in caplog.text


def test_a_stream_that_ends_as_all_are_failed_gets_one_final():
    replies = Replies(cancel=[].append, after_round=lambda: None, clock=time.monotonic)
    before, after = Caller(), Caller()
    first, second = replies.open(before), replies.open(after)
    replies.watch(first, 1)
    replies.watch(second, 2)
    replies.deliver([(first, Delta(text="whole", **END))])
    replies.fail_open(Overloaded("no more"))
    replies.deliver([(second, Delta(text="late", **END))])
    replies.start()
    before.wait()
    after.wait()
    replies.stop()
    assert (before.text, before.last.finish, before.finals) == ("whole", FinishReason.STOP, 1)
    assert (after.text, str(after.last.error), after.finals) == ("", "no more", 1)


def test_a_send_that_hangs_does_not_hold_up_the_end_for_ever(monkeypatch, caplog):
    monkeypatch.setattr("backend.replies.JOIN_S", 0.05)
    replies = start()
    entered, opened = threading.Event(), threading.Event()

    class Hanging(Caller):
        def send(self, delta, *, final):
            entered.set()
            assert opened.wait(WAIT_S)

    replies.deliver([(replies.open(Hanging()), Delta(**END))])
    assert entered.wait(WAIT_S)
    assert not replies.stop()
    assert "a send hangs" in caplog.text
    opened.set()
    assert replies.stop()


def test_a_refused_request_is_answered_without_a_ticket():
    replies = start()
    caller = Caller()
    replies.fail(replies.open(caller), Overloaded("no room"))
    assert isinstance(caller.wait().last.error, Overloaded)
    replies.stop()


def test_an_ended_stream_is_not_asked_again():
    replies = start()
    asked = []

    class Counting(Caller):
        def cancelled(self):
            asked.append(self.done.is_set())
            return False

    caller = Counting()
    stream = replies.open(caller)
    replies.deliver([(stream, Delta(**END))])
    caller.wait()
    replies.watch(stream, 1)
    beat = threading.Event()
    replies.stop()
    assert not beat.is_set()
    assert not any(asked), "a caller was asked after its last response"


def test_stop_sends_what_is_queued():
    replies = start()
    callers = [Caller() for _ in range(20)]
    for caller in callers:
        replies.deliver([(replies.open(caller), Delta(text="z", **END))])
    replies.stop()
    assert all(caller.finals == 1 for caller in callers)


def test_a_failing_round_hook_is_logged_and_survived(caplog):
    replies = start(after_round=lambda: 1 / 0)
    caller = Caller()
    replies.deliver([(replies.open(caller), Delta(**END))])
    caller.wait()
    replies.stop()
    assert "metrics could not be published" in caplog.text


def test_the_end_is_told_once_and_who_fails_to_take_it_harms_nobody(caplog):
    replies = start()
    heard = []

    def fail(delta):
        heard.append(delta.finish)
        raise RuntimeError("counted wrongly")

    callers = [Caller(), Caller()]
    for caller in callers:
        stream = replies.open(caller)
        stream.done = fail
        replies.deliver([(stream, Delta(text="a"))])
        replies.deliver([(stream, Delta(**END))])
        caller.wait()
    assert replies.stop()
    assert heard == [FinishReason.STOP] * 2
    assert "could not be counted" in caplog.text
