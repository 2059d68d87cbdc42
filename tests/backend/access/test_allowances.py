"""What each principal may use, on a clock that the test sets."""

import re
from dataclasses import replace

import pytest

from backend.access import EVERYBODY, Allowance, CountedAllowances, Verb
from backend.access.contract import Caller
from backend.errors import Overloaded

PROBE = Caller("@probe", "@probe", frozenset({Verb.INFER}), probe_only=True)


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def caller(name, **allowance):
    return replace(EVERYBODY, principal=name, allowance=Allowance(**allowance))


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def allowances(clock):
    """Room for twelve, of two principals."""
    return CountedAllowances(12, lambda: 2, clock)


def enter_all(allowances, who):
    """As many as are let in."""
    entered = 0
    while entered < 100:
        try:
            allowances.enter(who)
        except Overloaded:
            break
        entered += 1
    return entered


def test_without_an_allowance_only_the_room_counts(clock):
    alone = CountedAllowances(12, lambda: 1, clock)
    assert enter_all(alone, caller("a")) == 100


def test_concurrent_requests_are_counted(allowances):
    who = caller("a", concurrent=2)
    assert enter_all(allowances, who) == 2
    with pytest.raises(
        Overloaded,
        match=re.escape("principals.a.concurrent: at most 2 requests may be open, found 2: come again"),
    ):
        allowances.enter(who)
    allowances.leave(who, tokens=0)
    allowances.enter(who)


def test_requests_are_limited_to_a_second_of_them_at_once(allowances, clock):
    who = caller("a", requests_per_s=4)
    assert enter_all(allowances, who) == 4
    with pytest.raises(
        Overloaded,
        match=re.escape(
            "principals.a.requests_per_s: at most 4 requests a second, found more: come again in 0.3 s"
        ),
    ):
        allowances.enter(who)
    clock.now += 0.25
    allowances.enter(who)
    assert enter_all(allowances, who) == 0


def test_a_rate_below_one_lets_one_in(allowances, clock):
    who = caller("a", requests_per_s=0.1)
    assert enter_all(allowances, who) == 1
    clock.now += 9
    assert enter_all(allowances, who) == 0
    clock.now += 1
    assert enter_all(allowances, who) == 1


def test_a_prompt_is_charged_and_may_go_into_debt(allowances, clock):
    who = caller("a", tokens_per_s=100)
    allowances.enter(who)
    allowances.charge(who, 350)
    with pytest.raises(
        Overloaded,
        match=re.escape(
            "principals.a.tokens_per_s: at most 100 tokens a second, found 250 too many: come again in 2.5"
        ),
    ):
        allowances.enter(who)
    clock.now += 2.4
    assert enter_all(allowances, who) == 0
    clock.now += 0.1
    allowances.enter(who)


def test_a_request_that_entered_before_the_debt_is_not_charged_beyond_it(allowances):
    who = caller("a", tokens_per_s=100)
    allowances.enter(who)
    allowances.enter(who)
    allowances.charge(who, 101)
    with pytest.raises(Overloaded, match=r"principals\.a\.tokens_per_s"):
        allowances.charge(who, 1)


def test_output_is_charged_at_the_end(allowances, clock):
    who = caller("a", tokens_per_s=100)
    allowances.enter(who)
    allowances.leave(who, tokens=150)
    with pytest.raises(Overloaded, match="found 50 too many: come again in"):
        allowances.enter(who)
    clock.now += 0.5
    allowances.enter(who)


@pytest.mark.parametrize("allowance", [{"concurrent": 1}, {"tokens_per_s": 1}])
def test_a_refusal_costs_nothing(allowances, clock, allowance):
    who = caller("a", requests_per_s=2, **allowance)
    allowances.enter(who)
    allowances.charge(who, 2)
    for _ in range(10):
        with pytest.raises(Overloaded):
            allowances.enter(who)
    allowances.leave(who, tokens=0)
    clock.now += 1
    allowances.enter(who)
    with pytest.raises(Overloaded, match=r"requests_per_s|concurrent"):
        [allowances.enter(who) for _ in range(2)]


def test_one_that_floods_gets_half(allowances):
    assert enter_all(allowances, caller("flood")) == 6
    with pytest.raises(
        Overloaded,
        match=re.escape(
            "principals.flood: at most 6 of 12 requests may be open, and fewer while others ask, found 6"
        ),
    ):
        allowances.enter(caller("flood"))
    assert enter_all(allowances, caller("b")) == 3
    assert enter_all(allowances, caller("c")) >= 1


def test_many_that_flood_leave_room_for_one_more(allowances):
    names = [f"p{number}" for number in range(8)]
    open_requests = dict.fromkeys(names, 0)
    for _ in range(12):
        for name in names[:3]:
            try:
                allowances.enter(caller(name))
            except Overloaded:
                continue
            open_requests[name] += 1
    assert sum(open_requests.values()) < 12
    assert [open_requests[name] for name in names[:3]] == [3, 3, 3]
    allowances.enter(caller("late"))


def test_who_has_nothing_open_is_let_in(clock):
    tiny = CountedAllowances(1, lambda: 100, clock)
    for number in range(100):
        allowed = caller(f"p{number}")
        assert enter_all(tiny, allowed) == 1


def test_a_second_principal_in_the_file_ends_the_privilege_of_the_first(clock):
    number = [1]
    allowances = CountedAllowances(12, lambda: number[0], clock)
    for _ in range(8):
        allowances.enter(caller("a"))
    number[0] = 2
    assert enter_all(allowances, caller("a")) == 0
    assert enter_all(allowances, caller("b")) >= 1


def test_a_refusal_says_nothing_of_others(allowances):
    assert enter_all(allowances, caller("secretive")) == 6
    enter_all(allowances, caller("b"))
    with pytest.raises(Overloaded) as raised:
        allowances.enter(caller("b"))
    assert "secretive" not in str(raised.value)
    assert set(re.findall(r"\d+", str(raised.value))) == {"6", "12", "3"}  # half, all, and what b has


def test_a_changed_allowance_counts_at_once(allowances, clock):
    assert enter_all(allowances, caller("a", requests_per_s=2)) == 2
    assert enter_all(allowances, caller("a", requests_per_s=2)) == 0
    assert enter_all(allowances, caller("a", concurrent=3)) == 1
    clock.now += 1
    assert enter_all(allowances, caller("a", requests_per_s=1)) == 1


def test_principals_do_not_share_an_allowance(allowances):
    assert enter_all(allowances, caller("a", requests_per_s=1)) == 1
    assert enter_all(allowances, caller("b", requests_per_s=1)) == 1


def test_keys_of_a_principal_share_one(allowances):
    who = caller("a", concurrent=1)
    allowances.enter(replace(who, key_id="a-1"))
    with pytest.raises(Overloaded, match="concurrent"):
        allowances.enter(replace(who, key_id="a-2"))


def test_the_probe_is_never_refused_nor_counted(allowances):
    enter_all(allowances, caller("a"))
    for _ in range(50):
        allowances.enter(PROBE)
        allowances.charge(PROBE, 1_000_000)
        allowances.leave(PROBE, tokens=1_000_000)
    assert allowances.accounts == 1


def test_who_left_is_forgotten(allowances, clock):
    for number in range(500):
        who = caller(f"p{number}", requests_per_s=2, tokens_per_s=2)
        allowances.enter(who)
        allowances.charge(who, 1)
        allowances.leave(who, tokens=1)
        clock.now += 1
        assert allowances.accounts < 5


def test_who_is_in_debt_or_has_something_open_is_not_forgotten(allowances, clock):
    debtor, waiting = caller("debtor", tokens_per_s=1), caller("waiting", concurrent=1)
    allowances.enter(debtor)
    allowances.leave(debtor, tokens=1_000)
    allowances.enter(waiting)
    for number in range(50):
        clock.now += 1
        other = caller(f"p{number}")
        allowances.enter(other)
        allowances.leave(other, tokens=0)
    for who in (debtor, waiting):
        with pytest.raises(Overloaded):
            allowances.enter(who)


def test_leaving_more_often_than_entering_is_a_fault_of_ours(allowances):
    allowances.enter(caller("a"))
    allowances.leave(caller("a"), tokens=0)
    with pytest.raises(AssertionError, match="left more often"):
        allowances.leave(caller("a"), tokens=0)


def test_room_that_becomes_known_later_counts_from_then_on(clock):
    allowances = CountedAllowances(0, lambda: 2, clock)
    assert enter_all(allowances, caller("a")) == 1
    allowances.bound(12)
    assert enter_all(allowances, caller("a")) == 5
