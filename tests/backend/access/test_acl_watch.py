"""An acl file that changes while requests are decided by it."""

import logging
import os
import threading

import pytest

from backend.access import AclAccess, Verb
from backend.access.acl_watch import AclWatch
from backend.errors import AccessDenied
from cachemgr import NamespaceShare
from tests.backend.access.acl_rig import AclText, api_key

WAIT_S = 30
EDITS = 1_000


def settle(access):
    """What changed must be the same at two looks."""
    access.watch.look()
    access.watch.look()


def names(access):
    return sorted(access._view.acl.principals)


def errors(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.fixture
def path(tmp_path):
    return AclText().principal("first").write(tmp_path / "acl.toml")


@pytest.fixture
def access(path):
    return AclAccess("m", path)


@pytest.mark.parametrize("how", ["in place", "renamed"])
def test_an_edit_is_in_force(access, path, how, caplog):
    caplog.set_level(logging.INFO)
    edited = AclText().principal("second")
    if how == "renamed":
        edited.write(path)
    else:
        path.write_text(str(edited))
    settle(access)
    assert names(access) == ["second"]
    assert "has changed and is in force: 1 principals" in caplog.text


def test_an_edit_of_the_same_length_and_time_is_seen(access, path):
    before = path.stat()
    path.write_text(path.read_text().replace("first", "third"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    settle(access)
    assert names(access) == ["third"]


def test_what_is_being_written_waits_until_it_is_whole(access, path):
    whole = str(AclText().principal("second").principal("third"))
    path.write_text(whole[: whole.index('[principals."third"]')])
    access.watch.look()
    assert names(access) == ["first"]
    path.write_text(whole)
    access.watch.look()
    assert names(access) == ["first"]
    access.watch.look()
    assert names(access) == ["second", "third"]


def _break(path):
    path.write_text("[principals.first]\n")


def _unlink(path):
    path.unlink()


def _cut(path):
    path.write_text(" \n")


def _open_to_all(path):
    path.chmod(0o666)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_break, "principals.first.models: must be given"),
        (_cut, "expected principals, found an empty file"),
        (_unlink, "found none: put it back"),
        (_open_to_all, "found mode 0666"),
    ],
)
def test_a_bad_edit_changes_nothing_and_is_said_once(access, path, spoil, said, caplog):
    caplog.set_level(logging.INFO)
    spoil(path)
    for _ in range(5):
        access.watch.look()
    assert names(access) == ["first"]
    (line,) = errors(caplog)
    assert said in line
    assert "what was in force stays so" in line
    AclText().principal("first").write(path)
    settle(access)
    assert "is again what is in force" in caplog.text
    assert len(errors(caplog)) == 1


def test_each_other_trouble_is_said(access, path, caplog):
    for spoil in (_break, _unlink):
        spoil(path)
        settle(access)
    assert len(errors(caplog)) == 2


def test_after_a_bad_edit_a_good_one_counts(access, path):
    _break(path)
    settle(access)
    AclText().principal("second").write(path)
    settle(access)
    assert names(access) == ["second"]


def test_a_folder_of_links_that_is_flipped_is_followed(tmp_path):
    """As Kubernetes mounts a ConfigMap: acl.toml → ..data/acl.toml, ..data → the newest folder."""
    for name in ("first", "second"):
        (tmp_path / f"..{name}").mkdir()
        AclText().principal(name).write(tmp_path / f"..{name}" / "acl.toml")
    (tmp_path / "..data").symlink_to("..first")
    (tmp_path / "acl.toml").symlink_to("..data/acl.toml")
    access = AclAccess("m", tmp_path / "acl.toml")
    (tmp_path / "..data_tmp").symlink_to("..second")
    os.replace(tmp_path / "..data_tmp", tmp_path / "..data")
    settle(access)
    assert names(access) == ["second"]


def test_shares_are_told_now_and_when_they_change(access, path):
    told, late = [], []
    access.follow(lambda shares: told.append(dict(shares)))
    text = AclText().principal("first")
    text.key("first", "first-1").write(path)
    settle(access)
    assert told == [{"first": NamespaceShare(1.0, 0.5)}]
    text.add("[namespaces.first]\nquota = 0.25").write(path)
    settle(access)
    access.follow(lambda shares: late.append(dict(shares)))
    assert told[1:] == late == [{"first": NamespaceShare(0.25, 0.25)}]


def test_a_listener_that_fails_keeps_nobody_from_hearing(access, path, caplog):
    told = []

    def fails(shares):
        if "second" in shares:
            raise RuntimeError("no")

    access.follow(fails)
    access.follow(lambda shares: told.append(sorted(shares)))
    AclText().principal("second").write(path)
    settle(access)
    assert told == [["first"], ["second"]]
    assert "could not be told" in caplog.text


def test_the_thread_looks_by_itself_and_ends(path):
    changed, looked = threading.Event(), threading.Event()

    def take(acl):
        if "second" in acl.principals:
            changed.set()

    watch = AclWatch(path, take, beside=looked.set, look_s=0.01)
    watch.start()
    AclText().principal("second").write(path)
    assert changed.wait(WAIT_S)
    assert looked.wait(WAIT_S)
    watch.close()
    watch.close()
    assert not watch._thread.is_alive()


def test_a_fault_of_ours_does_not_end_the_thread(path, caplog):
    faults = iter([True, False])
    healed = threading.Event()

    def beside():
        if next(faults, False):
            raise RuntimeError("a fault")
        healed.set()

    watch = AclWatch(path, lambda acl: None, beside=beside, look_s=0.01)
    watch.start()
    assert healed.wait(WAIT_S)
    watch.close()
    assert "a fault" in caplog.text


def test_each_answer_is_by_one_whole_version(tmp_path):
    """Each version gives one namespace and hides cached tokens, or another one and does not."""
    path = tmp_path / "acl.toml"
    versions = [
        AclText().principal("p", f'namespace = "v{odd}"', f"hide_cached_tokens = {str(bool(odd)).lower()}")
        for odd in (0, 1)
    ]
    credential = versions[0].key("p", "k").credentials["k"]
    versions[1].add(versions[0]._parts[-1])
    versions[0].write(path)
    access = AclAccess("m", path)
    broken, seen, done = [], set(), threading.Event()

    def ask():
        while not done.wait(0.0005):  # who asks without a pause leaves the editor no turn
            try:
                caller = access.authorise(api_key(credential), verb=Verb.INFER)
            except AccessDenied as denied:
                broken.append(denied.why)
                return
            seen.add((caller.namespace, caller.hides_cached_tokens))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(EDITS):
        versions[number % 2].write(path)
        if number % 50 == 3:
            path.write_text("[")
        access.watch.look()
        if number % 3 == 0:
            access.watch.look()
    versions[1].write(path)
    settle(access)
    done.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert broken == []
    assert seen <= {("v0", False), ("v1", True)}
    assert len(seen) == 2
    assert access.authorise(api_key(credential), verb=Verb.INFER).namespace == "v1"
