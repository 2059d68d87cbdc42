"""Whatever principals do, in whichever order: no limit is ever broken, and nobody is refused without one."""

import threading
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from backend.access import EVERYBODY, Allowance, CountedAllowances
from backend.errors import Overloaded

NAMES = ["a", "b", "c"]
_SLACK = 1e-6


class Traffic(RuleBasedStateMachine):
    """What was let in is written down, and judged by the definition of a limit: over every span of time."""

    @initialize(
        capacity=st.integers(1, 12),
        allowances=st.lists(
            st.builds(
                Allowance,
                st.none() | st.sampled_from([0.5, 1.0, 3.0]),
                st.none() | st.sampled_from([5.0, 50.0]),
                st.none() | st.integers(1, 4),
            ),
            min_size=len(NAMES),
            max_size=len(NAMES),
        ),
    )
    def begin(self, capacity, allowances):
        self.now = 0.0
        self.capacity = capacity
        self.counted = CountedAllowances(capacity, lambda: len(NAMES), lambda: self.now)
        self.allowance = dict(zip(NAMES, allowances, strict=True))
        self.open = dict.fromkeys(NAMES, 0)
        self.entered = {name: [] for name in NAMES}
        self.tokens = {name: [] for name in NAMES}

    def caller(self, name):
        return replace(EVERYBODY, principal=name, allowance=self.allowance[name])

    def debt(self, name):
        """What a bucket lacks now, worked out from everything that was ever taken from it."""
        rate = self.allowance[name].tokens_per_s
        if rate is None:
            return 0.0
        level, then = max(1.0, rate), 0.0
        for at, tokens in self.tokens[name]:
            level = min(max(1.0, rate), level + (at - then) * rate) - tokens
            then = at
        return max(0.0, -(level + (self.now - then) * rate))

    @rule(name=st.sampled_from(NAMES))
    def enter(self, name):
        allowance, total = self.allowance[name], sum(self.open.values())
        room = max(1, min(self.capacity // 2, self.capacity - total))
        too_many = self.open[name] >= min(room, allowance.concurrent or room)
        try:
            self.counted.enter(self.caller(name))
        except Overloaded as error:
            assert str(error).startswith(f"principals.{name}")  # noqa: PT017
            assert too_many or self.debt(name) > 0 or self.rate_is_used(name)
        else:
            assert not too_many
            assert self.debt(name) <= _SLACK
            self.open[name] += 1
            self.entered[name].append(self.now)

    def rate_is_used(self, name):
        """One more now would be too many over some span."""
        rate, times = self.allowance[name].requests_per_s, [*self.entered[name], self.now]
        return rate is not None and any(
            len(times) - first > max(1.0, rate) + rate * (self.now - times[first]) - _SLACK
            for first in range(len(times))
        )

    @rule(name=st.sampled_from(NAMES), tokens=st.integers(0, 40))
    def charge(self, name, tokens):
        if not self.open[name]:
            return
        try:
            self.counted.charge(self.caller(name), tokens)
        except Overloaded:
            assert self.debt(name) > 0
        else:
            assert self.debt(name) <= _SLACK
            self.tokens[name].append((self.now, tokens))

    @rule(name=st.sampled_from(NAMES), tokens=st.integers(0, 40))
    def leave(self, name, tokens):
        if self.open[name]:
            self.counted.leave(self.caller(name), tokens=tokens)
            self.open[name] -= 1
            self.tokens[name].append((self.now, tokens))

    @rule(passed=st.sampled_from([0.125, 0.5, 2.0, 60.0]))
    def wait(self, passed):
        self.now += passed

    @invariant()
    def rates_hold_over_every_span(self):
        for name in NAMES:
            rate, times = self.allowance[name].requests_per_s, self.entered[name]
            if rate is not None and times:
                for first in range(len(times)):
                    spent = len(times) - first
                    assert spent <= max(1.0, rate) + rate * (times[-1] - times[first]) + _SLACK

    @invariant()
    def no_more_are_remembered_than_there_are(self):
        assert self.counted.accounts <= len(NAMES)


Traffic.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTraffic = Traffic.TestCase


def test_threads_never_exceed_a_limit_together():
    counted = CountedAllowances(1_000, lambda: 2)
    who = replace(EVERYBODY, principal="a", allowance=Allowance(concurrent=3))
    lock, at_once, most = threading.Lock(), [0], [0]

    def ask():
        for _ in range(500):
            try:
                counted.enter(who)
            except Overloaded:
                continue
            with lock:
                at_once[0] += 1
                most[0] = max(most[0], at_once[0])
            with lock:
                at_once[0] -= 1
            counted.leave(who, tokens=1)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert 1 <= most[0] <= 3
    for _ in range(3):
        counted.enter(who)
    with pytest.raises(Overloaded, match="concurrent"):
        counted.enter(who)
