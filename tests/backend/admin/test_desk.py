"""An admin speaks to a decoder that serves: what is made public is computed once, and only then shared."""

import json
from dataclasses import replace

import numpy as np
import pytest

from backend.access import EVERYBODY, Access, Allowance, Verb, open_access
from backend.admin import AdminDesk, PublicPrefixes
from backend.errors import AccessDenied, InvalidRequest, Overloaded
from cachemgr import NamespaceShare
from tests.backend.service_rig import Caller, KeptEngine, ServiceRig, host_cache, text, text_model

BLOCK = 16
HANDBOOK = list(range(5, 5 + 4 * BLOCK))
ADMIN = replace(
    EVERYBODY, principal="ops", namespace="ops", verbs=frozenset(Verb), key_id="ops-1",
    allowance=Allowance(requests_per_s=5),
)  # fmt: skip


class Doors:
    """An Authoriser: `api_key` is a name, and "ops" administers."""

    principals = 3

    def authorise(self, parameters, *, verb):
        name = parameters.get("api_key", "")
        caller = ADMIN if name == "ops" else replace(EVERYBODY, principal=name, namespace=name)
        if not caller.may(verb):
            raise AccessDenied("verb", principal=name)
        return caller

    def follow(self, listener):
        pass

    def close(self):
        pass


@pytest.fixture(scope="module")
def kept(engine, small_release):
    return KeptEngine(engine(small_release, lanes=4, threads=1))


@pytest.fixture
def cache(kept, tmp_path):
    return host_cache(kept.spec, tmp_path, host_bytes=8 << 20)


@pytest.fixture
def public(tmp_path, cache):
    made = PublicPrefixes(tmp_path / "public", "m")
    made.follow(cache.set_public)
    return made


@pytest.fixture
def shares():
    return {"a": NamespaceShare(0.5, 0.1), "b": NamespaceShare()}


@pytest.fixture
def rig(kept, cache, public, shares, small_release):
    beside = open_access("m")
    desk = AdminDesk(public, shares=lambda: shares, hot=lambda: {"ab12": 7000.0})
    with ServiceRig(
        kept, cache, text_model(small_release), admin=desk, lane_ttl_s=0,
        access=Access(Doors(), beside.allowances, beside.audit),
    ) as made:  # fmt: skip
        yield made


def tell(rig, command, *, key="ops", prompt=None):
    """The last delta of the answer."""
    caller = Caller()
    inputs = {}
    if prompt is not None:
        inputs = (
            {"text_input": text(prompt)}
            if isinstance(prompt, str)
            else {"input_ids": np.array(prompt, np.int32)}
        )
    said = command if isinstance(command, str) else json.dumps(command)
    parameters = {"admin": said, "api_key": key}
    rig.service.handle("r", lambda: inputs, parameters, sender=lambda generation: caller)
    return caller.wait().last


def ask(rig, prompt, key):
    return rig.ask(prompt, max_tokens=1, parameters={"api_key": key})


def answer(rig, command, **options):
    last = tell(rig, command, **options)
    assert last.error is None, last.error
    return json.loads(last.text)


def add(rig, name="handbook", prompt=HANDBOOK):
    return answer(rig, {"command": "public.add", "name": name}, prompt=prompt)


def test_a_public_prefix_is_computed_once_for_all_and_what_follows_is_private(rig):
    a, b = ([*HANDBOOK, *range(100, 100 + 2 * BLOCK), *[tenant] * 5] for tenant in (1, 2))
    assert ask(rig, a, "a").cached == 0
    assert ask(rig, b, "b").cached == 0
    assert add(rig) == {"name": "handbook", "tokens": 64, "blocks": 4, "added": True}
    assert ask(rig, a, "a").cached == 0  # what was private stays so
    assert ask(rig, b, "b").cached == 4 * BLOCK
    assert ask(rig, b, "b").cached == 6 * BLOCK
    answer(rig, {"command": "public.remove", "name": "handbook"})
    assert ask(rig, b, "c").cached == 0


def test_whole_blocks_alone_are_shared(rig):
    prompt = [*HANDBOOK, 1, 2, 3]
    assert add(rig, prompt=prompt)["blocks"] == 4
    ask(rig, [*prompt, *range(200, 230)], "a")
    assert ask(rig, [*prompt, *range(200, 230)], "b").cached == 4 * BLOCK


def test_what_is_public_is_listed_with_who_did_it_and_when(rig):
    add(rig)
    add(rig, "appendix", HANDBOOK[::-1])
    listed = answer(rig, {"command": "public.list"})["public"]
    assert [(one["name"], one["tokens"], one["by"]) for one in listed] == [
        ("appendix", 64, "ops"), ("handbook", 64, "ops"),
    ]  # fmt: skip
    assert listed[0]["registered"].endswith("+00:00")


def test_a_text_is_registered_as_the_tokens_of_a_request_with_it(rig, small_release, public):
    words = "the handbook of this house " * 3
    expected = text_model(small_release).encode(words)
    assert add(rig, prompt=words)["tokens"] == len(expected)
    assert np.array_equal(public.prefixes()[0], expected)


def test_less_than_a_block_is_refused_with_the_size_of_one(rig):
    last = tell(rig, {"command": "public.add", "name": "x"}, prompt=HANDBOOK[:15])
    assert str(last.error) == (
        "prompt: must have at least 16 tokens, one block, since only whole ones are shared, got 15"
    )


def test_namespaces_say_what_each_holds_and_may_hold(rig, cache, monkeypatch):
    monkeypatch.setattr(cache, "usage", lambda: {"a": 3, "": 9})
    assert answer(rig, {"command": "namespaces"}) == {
        "namespaces": {
            "a": {"blocks": 3, "quota": 0.5, "min_share": 0.1},
            "b": {"blocks": 0, "quota": 1.0, "min_share": 0.0},
        },
        "others": 9,
    }


def test_hot_segments_and_who_asks(rig):
    assert answer(rig, {"command": "hot"}) == {"hot": {"ab12": 7000.0}}
    assert answer(rig, {"command": "whoami"}) == {
        "principal": "ops", "key": "ops-1", "namespace": "ops",
        "verbs": ["admin", "cache.read", "cache.write", "infer"],
        "requests_per_s": 5, "tokens_per_s": None, "concurrent": None, "hide_cached_tokens": False,
    }  # fmt: skip


@pytest.mark.parametrize("key", ["a", ""])
@pytest.mark.parametrize(
    "command", ["public.add", "public.list", "public.remove", "namespaces", "hot", "whoami"]
)
def test_whoever_is_no_admin_gets_the_same_refusal_for_every_command(rig, public, command, key):
    last = tell(rig, {"command": command, "name": "x"}, key=key, prompt=HANDBOOK)
    assert str(last.error) == str(AccessDenied("whatever"))
    assert public.prefixes() == []


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("", "admin: must be JSON"),
        ("[]", "admin: must be a JSON object"),
        (
            "{}",
            "admin.command: must be one of public.add, public.list, public.remove, namespaces, hot, whoami",
        ),
        ('{"command": "drop"}', "admin.command: must be one of"),
        ('{"command": ["public.add"]}', "admin.command: must be one of"),
        ('{"command": "hot", "command": "hot"}', "must not give a key twice"),
        ('{"command": "hot", "name": "x"}', "admin.name: is not known; hot has no field"),
        ('{"command": "public.add"}', "admin.name: must be given, as text"),
        ('{"command": "public.add", "name": 1}', "admin.name: must be given, as text"),
        (
            '{"command": "public.add", "name": "x", "salt": "y"}',
            "admin.salt: is not known; public.add has name",
        ),
        ('{"command": "public.add", "name": "../x"}', "name: must be 1 to 63 characters"),
        ('{"command": "public.remove", "name": "x"}', "no public prefix of this model has it"),
        ('{"command": "hot"' + " " * 4096 + "}", "admin: must have at most 4096 characters"),
        ("[" * 4000, "admin: must be JSON within reason"),
    ],
)
def test_a_wrong_command_is_refused_by_name(rig, public, command, words):
    last = tell(rig, command, prompt=HANDBOOK)
    assert isinstance(last.error, InvalidRequest)
    assert words in str(last.error)
    assert public.prefixes() == []


def test_a_command_that_is_no_text_is_refused(public):
    with pytest.raises(InvalidRequest, match="admin: must be text"):
        AdminDesk(public).answer(ADMIN, True, {}, None)


def test_while_nothing_serves_only_what_needs_no_release_is_answered(public):
    desk = AdminDesk(public)
    for command in ("namespaces", "public.add"):
        said = json.dumps({"command": command, **({"name": "x"} if "." in command else {})})
        with pytest.raises(Overloaded, match="no release serves"):
            desk.answer(ADMIN, said, {}, None)
    assert json.loads(desk.answer(ADMIN, '{"command": "public.list"}', {}, None)) == {"public": []}
