"""What is public for a model: every process of the node sees the same, and what cannot be read is private."""

import logging
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from backend.admin import PublicPrefixes, public_prefixes
from backend.errors import ConfigError, InvalidRequest, Overloaded
from tests.full_disk import room_for

WAIT_S = 20


def ids(count, first=0):
    return np.arange(first, first + count, dtype=np.int64)


def heard(prefixes):
    return [list(tokens) for tokens in prefixes]


@pytest.fixture
def registry(tmp_path):
    return PublicPrefixes(tmp_path, "m")


@pytest.fixture
def other(tmp_path):
    """Another process of the node."""
    return PublicPrefixes(tmp_path, "m")


def names(registry):
    return [prefix.name for prefix in registry.registered()]


def test_a_listener_hears_what_is_there_and_every_change(registry):
    news = []
    registry.add("a", ids(3), by="ops")
    registry.follow(lambda prefixes: news.append(heard(prefixes)))
    registry.add("b", ids(2, 7), by="ops")
    registry.remove("a")
    assert news == [[[0, 1, 2]], [[0, 1, 2], [7, 8]], [[7, 8]]]
    assert heard(registry.prefixes()) == [[7, 8]]


def test_a_listener_is_not_told_what_it_knows(registry):
    news = []
    registry.follow(news.append)
    registry.look()
    assert len(news) == 1


def test_a_listener_that_fails_keeps_the_news_from_nobody(registry, caplog):
    news = []

    def fail(prefixes):
        raise RuntimeError("cannot")

    registry.follow(fail)
    registry.follow(news.append)
    registry.add("a", ids(3), by="ops")
    assert len(news) == 2
    assert "could not be told" in caplog.text


def test_another_process_is_followed_without_being_asked(tmp_path, registry):
    follower = PublicPrefixes(tmp_path, "m", look_s=0.01)
    told = threading.Event()
    follower.follow(lambda prefixes: told.set() if len(prefixes) == 1 else None)
    follower.start()
    try:
        registry.add("a", ids(3), by="ops")
        assert told.wait(WAIT_S)
    finally:
        follower.close()
        follower.close()
    assert "public-prefixes" not in [thread.name for thread in threading.enumerate()]


def test_what_one_process_says_all_have(registry, other):
    assert registry.add("a", ids(3), by="ops")
    assert names(other) == ["a"]
    other.remove("a")
    assert names(registry) == []


def test_models_have_prefixes_of_their_own(tmp_path, registry):
    registry.add("a", ids(3), by="ops")
    assert names(PublicPrefixes(tmp_path, "n")) == []


def test_the_same_again_is_no_change_and_other_tokens_are_refused(registry, other):
    assert registry.add("a", ids(3), by="ops")
    assert not other.add("a", ids(3), by="somebody")
    with pytest.raises(InvalidRequest, match="name: is taken by 3 other tokens: remove it first"):
        other.add("a", ids(4), by="somebody")
    assert [prefix.by for prefix in other.registered()] == ["ops"]


def test_of_two_that_write_a_name_at_once_one_wins(registry, other, monkeypatch):
    monkeypatch.setattr(other, "look", lambda: None)  # it looked before the first one wrote
    registry.add("a", ids(3), by="ops")
    with pytest.raises(InvalidRequest, match="is taken"):
        other.add("a", ids(4), by="ops")
    assert heard(registry.prefixes()) == [[0, 1, 2]]


@pytest.mark.parametrize("name", ["", "A", "a/b", "../a", "a" * 64, "é", "a\n", "a b", "a\0"])
def test_a_name_that_is_none_touches_no_file(tmp_path, registry, name):
    with pytest.raises(InvalidRequest, match=r"name: must be 1 to 63 characters of a-z, 0-9, \., _ and -"):
        registry.add(name, ids(3), by="ops")
    with pytest.raises(InvalidRequest, match="name: must be"):
        registry.remove(name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("model", ["", ".", "..", "a/b", "a\0b"])
def test_a_model_that_is_no_folder_is_refused(tmp_path, model):
    with pytest.raises(ConfigError):
        PublicPrefixes(tmp_path, model)


def test_what_is_not_there_cannot_be_removed(registry):
    with pytest.raises(InvalidRequest, match="no public prefix of this model has it"):
        registry.remove("a")


def test_too_many_are_refused_with_the_limit(registry, monkeypatch):
    monkeypatch.setattr(public_prefixes, "MAX_PREFIXES", 2)
    monkeypatch.setattr(public_prefixes, "MAX_TOKENS", 10)
    registry.add("a", ids(4), by="ops")
    with pytest.raises(Overloaded, match="10 tokens together: 4 are there, and 7 more"):
        registry.add("b", ids(7), by="ops")
    registry.add("b", ids(6), by="ops")
    with pytest.raises(Overloaded, match="2 public prefixes"):
        registry.add("c", ids(1), by="ops")
    assert names(registry) == ["a", "b"]


def test_what_is_beyond_the_bounds_in_the_folder_is_private(registry, monkeypatch, caplog):
    for name, count in (("a", 4), ("b", 9), ("c", 6), ("d", 1)):
        registry.add(name, ids(count), by="ops")
    monkeypatch.setattr(public_prefixes, "MAX_PREFIXES", 2)
    monkeypatch.setattr(public_prefixes, "MAX_TOKENS", 10)
    assert names(registry) == ["a", "c"]
    assert "b.json: is beyond the 10 tokens" in caplog.text
    assert "d.json: is beyond the 2 prefixes" in caplog.text


def test_a_broken_file_costs_one_line_and_nothing_else(tmp_path, registry, caplog):
    registry.add("a", ids(3), by="ops")
    registry.add("b", ids(4), by="ops")
    broken = tmp_path / "m" / "a.json"
    good = broken.read_bytes()
    broken.write_bytes(good[:-9])
    for _ in range(3):
        assert names(registry) == ["b"]
    lines = [line.getMessage() for line in caplog.records if line.levelno == logging.ERROR]
    assert len(lines) == 1
    assert "a.json: expected a public prefix of format 1" in lines[0]
    broken.write_bytes(good)
    assert names(registry) == ["a", "b"]
    broken.write_bytes(good[:-9])
    names(registry)
    assert len([line for line in caplog.records if line.levelno == logging.ERROR]) == 2


def test_an_edit_that_changes_no_stamp_is_seen(tmp_path, registry):
    registry.add("a", ids(3), by="ops")
    path = tmp_path / "m" / "a.json"
    before = path.stat()
    path.write_bytes(path.read_bytes().replace(b"[0,1,2]", b"[0,1,3]"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert heard(registry.prefixes()) == [[0, 1, 3]]


def test_a_broken_file_can_be_removed_by_name(tmp_path, registry):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "a.json").write_text("no")
    with pytest.raises(InvalidRequest, match="is taken by something that is none"):
        registry.add("a", ids(3), by="ops")
    registry.remove("a")
    assert registry.add("a", ids(3), by="ops")


def test_a_folder_that_vanishes_or_cannot_be_read_makes_all_private(tmp_path, registry, caplog):
    registry.add("a", ids(3), by="ops")
    (tmp_path / "m").rename(tmp_path / "away")
    assert names(registry) == []
    assert caplog.text == ""
    (tmp_path / "m").write_text("")
    assert names(registry) == []
    assert "m: cannot be read: Not a directory" in caplog.text
    (tmp_path / "m").unlink()
    (tmp_path / "away").rename(tmp_path / "m")
    assert names(registry) == ["a"]


def test_a_full_disk_is_said_with_the_setting_that_helps(tmp_path, registry):
    registry.add("a", ids(3), by="ops")
    with room_for(40), pytest.raises(ConfigError, match=r"access\.public_dir: .*cannot be changed: "):
        registry.add("b", ids(40), by="ops")
    assert names(registry) == ["a"]
    assert os.listdir(tmp_path / "m") == ["a.json"]


class Registries(RuleBasedStateMachine):
    """Two processes and a dict that says what they must agree on."""

    def __init__(self):
        super().__init__()
        self.folder = Path(os.path.realpath(self._scratch()))
        self.both = [PublicPrefixes(self.folder, "m") for _ in range(2)]
        self.model = {}
        self.told = [[], []]
        for registry, told in zip(self.both, self.told, strict=True):
            registry.follow(told.append)

    def _scratch(self):
        import tempfile

        self.scratch = tempfile.TemporaryDirectory()
        return self.scratch.name

    @rule(who=st.integers(0, 1), name=st.sampled_from("abc"), count=st.integers(1, 3))
    def add(self, who, name, count):
        expected = self.model.setdefault(name, count)
        try:
            self.both[who].add(name, ids(count), by="ops")
        except InvalidRequest:
            assert count != expected
        else:
            assert count == expected

    @rule(who=st.integers(0, 1), name=st.sampled_from("abc"))
    def remove(self, who, name):
        try:
            self.both[who].remove(name)
        except InvalidRequest:
            assert name not in self.model
        else:
            del self.model[name]

    @rule(name=st.sampled_from("abc"))
    def break_one(self, name):
        if name in self.model:
            (self.folder / "m" / f"{name}.json").unlink()
            del self.model[name]

    @invariant()
    def all_agree(self):
        expected = [list(range(count)) for _, count in sorted(self.model.items())]
        for registry, told in zip(self.both, self.told, strict=True):
            assert heard(registry.prefixes()) == expected
            assert heard(told[-1]) == expected

    def teardown(self):
        self.scratch.cleanup()


TestRegistries = Registries.TestCase
TestRegistries.settings = settings(max_examples=25, stateful_step_count=12, deadline=None)
