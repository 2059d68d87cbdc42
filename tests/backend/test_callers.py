"""The door asks who comes before it reads a word, and knows of each how many requests they have open."""

import threading
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from backend.access import EVERYBODY, Access, Verb
from backend.errors import AccessDenied, BackendStuck, EngineFailed, InvalidRequest, Overloaded
from tests.backend.service_rig import WAIT_S, Caller, KeptEngine, ServiceRig, host_cache, text_model

PROMPT = list(range(5, 80))


class Doorkeeper:
    """Authoriser, Allowances and Audit in one, that remembers; `callers` by api_key."""

    principals = 2

    def __init__(self):
        self.callers = {"a": replace(EVERYBODY, principal="a", namespace="a")}
        self.open = Counter()
        self.charged = Counter()
        self.tokens = Counter()
        self.refusals = []
        self.commands = []
        self.no_room = set()
        self.empty = threading.Event()

    def authorise(self, parameters, *, verb):
        caller = self.callers.get(parameters.get("api_key"))
        if caller is None or not caller.may(verb):
            raise AccessDenied(f"may not {verb}", principal=caller.principal if caller else "")
        return caller

    def follow(self, listener):
        pass

    def close(self):
        pass

    def bound(self, capacity):
        self.capacity = capacity

    def enter(self, caller):
        if "enter" in self.no_room:
            raise Overloaded("concurrent: full")
        self.empty.clear()
        self.open[caller.principal] += 1

    def charge(self, caller, tokens):
        if "charge" in self.no_room:
            raise Overloaded("tokens_per_s: used up")
        self.charged[caller.principal] += tokens

    def leave(self, caller, *, tokens):
        self.open[caller.principal] -= 1
        self.tokens[caller.principal] += tokens
        if not +self.open:
            self.empty.set()

    def refused(self, request_id, denied):
        self.refusals.append((denied.principal, denied.why))

    def commanded(self, request_id, caller, command, outcome):
        self.commands.append((caller.principal, command, outcome))


class Echo:
    """An Administrator that says what it was told; the command "bad" is none, and "burst" a fault of ours."""

    def answer(self, caller, command, inputs, release):
        if command == "bad":
            raise InvalidRequest("admin", "unknown command")
        if command == "burst":
            raise RuntimeError("a fault of ours")
        return f"{caller.principal}: {command}"


@pytest.fixture
def door():
    return Doorkeeper()


@pytest.fixture(scope="module")
def kept(engine, small_release):
    return KeptEngine(engine(small_release, lanes=4, threads=1))


@pytest.fixture
def rig(door, kept, small_release, tmp_path):
    cache = host_cache(kept.spec, tmp_path)
    with ServiceRig(
        kept, cache, text_model(small_release), access=Access(door, door, door), admin=Echo()
    ) as made:
        yield made


def as_caller(**parameters):
    return {"parameters": {"api_key": "a", **parameters}}


def nobody_is_in(door):
    return door.empty.wait(WAIT_S) and not +door.open


def test_whoever_has_no_credential_learns_nothing_and_no_input_is_read(rig, door):
    caller, read = Caller(), []
    rig.service.handle("r", lambda: read.append(1), {"api_key": "?"}, sender=lambda generation: caller)
    error = caller.wait().last.error
    assert isinstance(error, AccessDenied)
    assert str(error) == str(AccessDenied("another reason", principal="p"))
    assert read == []
    assert door.refusals == [("", "may not infer")]
    assert not door.open


def test_only_who_may_ask_hears_that_the_question_is_here(rig, door):
    def admitted(key):
        caller, heard = Caller(), []
        rig.service.handle(
            "r", lambda: {"input_ids": np.array(PROMPT, np.int32)}, {"api_key": key},
            sender=lambda generation: caller, admitted=lambda: heard.append(len(caller.deltas)),
        )  # fmt: skip
        caller.wait()
        return heard

    assert admitted("a") == [0], "once, before anything else is said"
    assert admitted("?") == []
    door.no_room = {"enter"}
    assert admitted("a") == []


def test_a_request_counts_as_open_until_its_last_word_is_sent(rig, door):
    rig.ask(PROMPT, max_tokens=6, **as_caller())
    assert nobody_is_in(door)
    assert door.charged == {"a": len(PROMPT)}
    assert door.tokens == {"a": 6}


@pytest.mark.parametrize(
    ("prompt", "options"), [([], {}), (PROMPT, {"max_tokens": -1}), (PROMPT, {"temperature": 1e9})]
)
def test_whoever_is_refused_for_the_request_itself_has_left(rig, door, prompt, options):
    assert isinstance(rig.ask(prompt, **options, **as_caller()).last.error, InvalidRequest)
    assert nobody_is_in(door)


@pytest.mark.parametrize("where", ["enter", "charge"])
def test_whoever_is_beyond_the_allowance_is_told_so_and_has_left(rig, door, where):
    door.no_room = {where}
    door.empty.set()
    assert isinstance(rig.ask(PROMPT, **as_caller()).last.error, Overloaded)
    assert nobody_is_in(door)
    door.no_room = set()
    assert rig.ask(PROMPT, max_tokens=2, **as_caller()).last.error is None


def test_allowances_hear_how_many_requests_can_be_open(rig, door):
    assert door.capacity == 256 + 4


def test_whoever_hangs_up_has_left(rig, door):
    caller = rig.start(PROMPT, max_tokens=400, ignore_eos=True, **as_caller())
    assert caller.first.wait(WAIT_S)
    caller.gone = True
    caller.wait()
    assert nobody_is_in(door)


def test_streams_that_are_ended_because_the_loop_hangs_have_left(rig, door):
    caller = rig.start(PROMPT, max_tokens=400, ignore_eos=True, stream=True, **as_caller())
    assert caller.first.wait(WAIT_S)
    rig.service._replies.fail_open(BackendStuck("a test says so"))
    caller.wait()
    assert nobody_is_in(door)
    rig.service._replies.reopen()


def test_only_probes_are_let_in_on_the_probes_credential(rig, door):
    door.callers["p"] = replace(EVERYBODY, principal="@probe", probe_only=True)
    probe = {"api_key": "p", "triton_probe": True}
    assert rig.ask([5, 6], max_tokens=1, parameters=probe).last.error is None
    for prompt, options, parameters in (
        ([5, 6], {"max_tokens": 1}, {"api_key": "p"}),
        ([5, 6], {"max_tokens": 2}, probe),
        (PROMPT, {"max_tokens": 1}, probe),
    ):
        assert isinstance(rig.ask(prompt, parameters=parameters, **options).last.error, AccessDenied)
    assert door.refusals == [("@probe", "not_a_probe")] * 3
    assert nobody_is_in(door)


def test_a_caller_reads_and_writes_the_cache_only_where_that_is_allowed(rig, door):
    def allowed(*verbs):
        door.callers["a"] = replace(door.callers["a"], verbs=frozenset({Verb.INFER, *verbs}))

    def cached():
        answer = rig.ask(PROMPT, max_tokens=2, **as_caller())
        return answer.cached, answer.text

    allowed(Verb.CACHE_READ)
    first, text = cached()
    assert (first, cached()) == (0, (0, text)), "nothing is left by whoever may not write"
    allowed(Verb.CACHE_WRITE)
    assert (cached(), cached()) == ((0, text), (0, text)), "nothing is found by whoever may not read"
    allowed(Verb.CACHE_READ)
    assert cached() == (64, text)
    allowed()
    assert cached() == (0, text)


def test_a_prompt_is_not_held_up_by_a_block_that_only_others_may_read(rig, door):
    """Single flight waits for blocks that will be found, so not for one that is computed and not kept."""
    door.callers["w"] = replace(door.callers["a"], verbs=frozenset({Verb.INFER}))
    started = [rig.start(PROMPT, max_tokens=3, parameters={"api_key": key}) for key in "wawa"]
    texts = {caller.wait().text for caller in started}
    assert len(texts) == 1
    assert [caller.cached for caller in started][0::2] == [0, 0]


def test_a_command_is_an_admins_and_is_written_down(rig, door):
    door.callers["root"] = replace(EVERYBODY, principal="root", verbs=frozenset({Verb.ADMIN}))
    command = {"api_key": "root", "admin": "do"}
    answer = rig.ask(PROMPT, parameters=command)
    assert answer.text == "root: do"
    assert answer.last.finish == "stop"
    assert isinstance(rig.ask(PROMPT, parameters={**command, "admin": "bad"}).last.error, InvalidRequest)
    assert isinstance(rig.ask(PROMPT, **as_caller(admin="do")).last.error, AccessDenied)
    assert isinstance(rig.ask(PROMPT, parameters={"api_key": "root"}).last.error, AccessDenied)
    assert isinstance(rig.ask(PROMPT, parameters={**command, "admin": "burst"}).last.error, EngineFailed)
    assert door.commands == [
        ("root", "do", "done"), ("root", "bad", "admin: unknown command"), ("root", "burst", "failed")
    ]  # fmt: skip
    assert nobody_is_in(door)


def test_what_others_cached_is_not_seen_and_a_namespace_keeps_its_own(rig, door):
    door.callers["b"] = replace(EVERYBODY, principal="b", namespace="b")
    door.callers["a2"] = replace(door.callers["a"], principal="a2")
    answers, computed = [], []
    for key in ("a", "b", "a2", "b"):
        before = rig.engine.prefilled
        answers.append(rig.ask(PROMPT, max_tokens=2, parameters={"api_key": key}))
        computed.append(rig.engine.prefilled - before)
    assert [answer.cached for answer in answers] == [0, 0, 64, 64]
    assert computed == [75, 75, 11, 11], "a stranger's prompt takes as long as if nobody had asked it"
    assert len({answer.text for answer in answers}) == 1


def test_everybody_shares_what_is_public_and_nothing_behind_it(rig, door):
    door.callers["b"] = replace(EVERYBODY, principal="b", namespace="b")
    rig.cache.set_public([np.arange(5, 5 + 40)])  # one whole block of 32
    longer = list(range(5, 140))
    first, second = (rig.ask(longer, max_tokens=2, parameters={"api_key": key}) for key in "ab")
    assert (first.cached, second.cached) == (0, 32)
    assert first.text == second.text
    salted = {"max_tokens": 2, "cache_salt": "own"}
    assert rig.ask(longer, **salted, **as_caller()).cached == 0
