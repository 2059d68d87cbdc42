"""A server without access control takes up the acl file that is put beside its settings."""

import logging

import pytest

from backend.access import EVERYBODY, Verb, new_key
from backend.access.awaited_acl import AwaitedAcl
from backend.errors import AccessDenied, Overloaded
from cachemgr import NamespaceShare
from tests.waiting import wait_until

CREDENTIAL, ENTRY = new_key("a-1")
TEXT = f"""
[principals.a]
models = ["m"]
concurrent = 1
[[principals.a.keys]]
id = "a-1"
sha256 = "{ENTRY.sha256}"
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "acl.toml"


@pytest.fixture
def awaited(path):
    made = AwaitedAcl("m", path, look_s=0.01)
    made.start()
    yield made
    made.close()


def write(path, text):
    scratch = path.with_suffix(".new")
    scratch.write_text(text)
    scratch.chmod(0o600)
    scratch.replace(path)


def ask(awaited, credential=None):
    return awaited.authorise({} if credential is None else {"api_key": credential}, verb=Verb.INFER)


def is_on(awaited):
    try:
        ask(awaited)
    except AccessDenied:
        return True
    return False


def test_everybody_is_let_in_until_the_file_is_there_and_then_who_it_names(awaited, path, caplog):
    caplog.set_level(logging.WARNING)
    told = []
    awaited.bound(8)
    awaited.follow(told.append)
    before = ask(awaited)
    assert before == EVERYBODY
    awaited.enter(before)
    write(path, TEXT)
    wait_until(lambda: is_on(awaited))
    assert "access control is on from now on" in caplog.text
    assert told == [{"a": NamespaceShare(1.0, 0.5)}]
    caller = ask(awaited, CREDENTIAL)
    assert caller.principal == "a"
    assert awaited.principals == 1
    awaited.charge(before, 5)  # who came before is nobody here: not counted, and no trouble
    awaited.leave(before, tokens=7)
    awaited.enter(caller)
    with pytest.raises(Overloaded, match="concurrent"):
        awaited.enter(caller)
    awaited.charge(caller, 3)
    awaited.leave(caller, tokens=3)
    awaited.enter(caller)
    awaited.leave(caller, tokens=0)


def test_a_file_that_cannot_be_read_is_said_once_and_obeyed_when_it_is_mended(awaited, path, caplog):
    write(path, "[broken")
    wait_until(lambda: "everybody is still let in until this is mended" in caplog.text)
    assert ask(awaited) == EVERYBODY
    write(path, TEXT)
    wait_until(lambda: is_on(awaited))
    assert caplog.text.count("everybody is still let in") == 1


def test_nothing_leads_back(awaited, path):
    write(path, TEXT)
    wait_until(lambda: is_on(awaited))
    path.unlink()
    assert ask(awaited, CREDENTIAL).principal == "a"
    with pytest.raises(AccessDenied):
        ask(awaited)


def test_who_follows_and_how_much_room_there_is_may_also_be_said_later(awaited, path):
    write(path, TEXT)
    wait_until(lambda: is_on(awaited))
    told = []
    awaited.follow(told.append)
    awaited.bound(4)
    assert told == [{"a": NamespaceShare(1.0, 0.5)}]
    awaited.enter(ask(awaited, CREDENTIAL))
