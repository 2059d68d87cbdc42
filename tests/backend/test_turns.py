import pytest

from backend.deadlines import Deadlines
from backend.preemption import MAX_PREEMPTIONS, choose
from backend.sequence import Sequence, State, open_sequence
from backend.turns import Turns
from tests.backend.doubles import Collected, NumberText, generation


def sequence(
    ticket: int, principal: str = "", *, size: int = 10, max_tokens: int = 10, **options
) -> Sequence:
    request = generation(list(range(2, 2 + size)), principal=principal, max_tokens=max_tokens, **options)
    return open_sequence(
        ticket, request, sink=Collected(), text=NumberText(), row=None, eos=frozenset(), max_seq_len=1000
    )


def place_next(turns: Turns) -> Sequence:
    line = turns.order()[0][-1]
    seq = next(iter(line.waiting.values()))
    turns.placed(seq)
    return seq


def order_of(turns: Turns, count: int) -> str:
    """Who is served, each leaving its lane at once after all its tokens."""
    names = ""
    for _ in range(count):
        seq = place_next(turns)
        names += seq.request.principal
        seq.length = seq.tokens.shape[0]
        turns.left(seq)
    return names


def test_one_principal_is_served_in_order_of_arrival():
    turns = Turns(half=100)
    for ticket in (3, 5, 9):
        turns.append(sequence(ticket))
    assert [place_next(turns).ticket for _ in range(3)] == [3, 5, 9]
    assert not turns.order()


def test_a_flood_and_a_trickle_take_turns():
    turns = Turns(half=100)
    for ticket in range(20):
        turns.append(sequence(ticket, "a"))
    for ticket in range(20, 23):
        turns.append(sequence(ticket, "b"))
    served = order_of(turns, 8)
    assert served[:6].count("b") == 3
    assert served[6:] == "aa"


def test_turns_are_counted_in_tokens():
    turns = Turns(half=100)
    for ticket in range(30):
        turns.append(sequence(ticket, "a", size=30, max_tokens=10))
        turns.append(sequence(100 + ticket, "b", size=5, max_tokens=5))
    served = order_of(turns, 25)
    assert served.count("a") == 5
    assert served.count("b") == 20


def test_nobody_saves_up_turns_while_it_asks_for_nothing():
    turns = Turns(half=100)
    for ticket in range(40):
        turns.append(sequence(ticket, "a"))
    order_of(turns, 20)
    for ticket in range(40, 60):
        turns.append(sequence(ticket, "b"))
    assert order_of(turns, 10).count("b") == 5


def test_what_was_not_sampled_is_given_back():
    turns = Turns(half=100)
    for ticket in range(40):
        turns.append(sequence(ticket, "a", max_tokens=500))
        turns.append(sequence(100 + ticket, "b", max_tokens=10))
    names = ""
    for _ in range(20):
        seq = place_next(turns)
        names += seq.request.principal
        seq.length = 20  # both stop after ten tokens
        turns.left(seq)
    assert names.count("a") == names.count("b") == 10


def test_who_holds_less_than_half_comes_first():
    turns = Turns(half=1)
    turns.append(sequence(1, "a"))
    turns.append(sequence(2, "a", size=1, max_tokens=1))
    turns.append(sequence(3, "b", size=100))
    assert [place_next(turns).ticket for _ in range(3)] == [1, 3, 2]
    assert turns.above is not None
    assert turns.above.principal == "a"


def test_lines_are_forgotten_when_nobody_needs_them():
    turns = Turns(half=100)
    for number in range(50):
        turns.append(sequence(number, str(number)))
    for seq in list(turns):
        turns.remove(seq)
    assert not turns.lines
    assert turns.waiting == 0
    turns.append(sequence(1, "a"))
    turns.append(sequence(2, "b"))
    seq = place_next(turns)
    turns.left(seq)
    turns.check_integrity([])
    assert {line.principal for line in turns.lines} >= {"b"}


def test_the_parts_of_a_step_go_round_the_principals_oldest_first():
    turns = Turns(half=100)
    running = []
    for ticket, principal in enumerate("aaabbc"):
        turns.append(sequence(ticket, principal))
    while turns.waiting:
        running.append(place_next(turns))
    running.sort(key=lambda seq: seq.ticket)
    assert [seq.ticket for seq in turns.prefill_order(running)] == [0, 3, 5, 1, 4, 2]
    turns.prefilling(running[0])
    turns.prefilling(running[3])
    assert [seq.ticket for seq in turns.prefill_order(running)] == [5, 0, 3, 1, 4, 2]


def running(
    ticket: int, *, state: State = State.DECODE, cached: bool = True, preemptions: int = 0
) -> Sequence:
    seq = sequence(ticket, "a")
    seq.state, seq.preemptions = state, preemptions
    seq.written = seq.prefill_start = 4
    if cached:
        seq.hashes = [b"x"]
        seq.request = generation([1] * 10, principal="a", cache=_Names())
    return seq


class _Names:
    def hashes(self, tokens, **names):
        return [b"x"]


@pytest.mark.parametrize(
    ("seqs", "chosen"),
    [
        ([running(1), running(2)], 2),
        ([running(1), running(2, preemptions=MAX_PREEMPTIONS)], 1),
        ([running(1), running(2, cached=False)], 1),
        ([running(1, state=State.PREFILL), running(2)], 1),
        ([running(1, preemptions=MAX_PREEMPTIONS), running(2, preemptions=MAX_PREEMPTIONS)], 2),
        ([], None),
    ],
    ids=["youngest", "left alone after some times", "restorable", "not begun", "no other", "nobody"],
)
def test_who_is_preempted(seqs, chosen):
    found = choose([*seqs, sequence(9, "b")], "a")
    assert (found and found.ticket) == chosen


def test_deadlines_are_told_once_and_the_ended_are_dropped():
    deadlines = Deadlines()
    seqs = [sequence(number, deadline=float(10 - number)) for number in range(5)]
    for seq in [*seqs, sequence(9)]:
        deadlines.watch(seq, open_sequences=5)
    seqs[4].state = State.ENDED
    assert deadlines.passed(5.9) == []
    assert [seq.ticket for seq in deadlines.passed(8.0)] == [3, 2]
    assert [seq.ticket for seq in deadlines.passed(100.0)] == [1, 0]
    for number in range(1000):
        seq = sequence(number, deadline=1e9)
        deadlines.watch(seq, open_sequences=3)
        seq.state = State.ENDED
    assert len(deadlines._heap) < 100
