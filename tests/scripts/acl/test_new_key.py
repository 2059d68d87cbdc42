"""A new key: shown once, kept as a digest, and nothing else in the file changes."""

import os
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.access import parse_acl, read_acl
from backend.errors import ConfigError
from scripts.acl import acl_edit
from scripts.acl.acl_edit import append_to_acl
from scripts.acl.acl_text import NewPrincipal, key_text, principal_text
from scripts.cli import main
from tests.full_disk import room_for

CREDENTIAL = re.compile(r"([a-z0-9-]+)\.([A-Za-z0-9_-]{43})\n")
FILE = """\
# ours
[principals.search]  # the first
models = ["smollm2"]
concurrent = 3

[principals."odd name".keys]
"""
EXISTING = FILE.split('[principals."odd')[0]


@pytest.fixture
def acl(tmp_path):
    return tmp_path / "acl.toml"


def new_key(acl, *words):
    return main(["acl", "new-key", *words, "--acl", str(acl)])


def test_the_credential_is_the_one_line_on_stdout_and_opens_the_file(acl, capsys):
    assert new_key(acl, "search", "--models", "smollm2", "qwen*") == 0
    out, err = capsys.readouterr()
    assert CREDENTIAL.fullmatch(out)
    found = read_acl(acl)
    assert found.find(out.strip(), now=0).principal == "search"
    assert found.principals["search"].models == ("smollm2", "qwen*")
    secret = out.strip().partition(".")[2]
    digest = found.principals["search"].keys[0].sha256
    assert secret not in err + acl.read_text()
    assert digest not in out + err
    assert acl.stat().st_mode & 0o777 == 0o600


def test_a_new_file_is_said_to_close_the_door(acl, capsys):
    new_key(acl, "search", "--models", "*")
    assert "obeys it within a second" in capsys.readouterr().err
    new_key(acl, "search")
    assert "obeys it" not in capsys.readouterr().err


def test_a_second_key_keeps_comments_order_and_the_first_key(acl, capsys):
    acl.write_text(EXISTING)
    acl.chmod(0o640)
    keys = []
    for _ in range(2):
        assert new_key(acl, "search") == 0
        keys.append(capsys.readouterr().out.strip())
    assert acl.read_text().startswith(EXISTING)
    assert acl.stat().st_mode & 0o777 == 0o640
    found = read_acl(acl)
    assert [found.find(key, now=0).key_id for key in keys] == ["search-1", "search-2"]
    assert found.principals["search"].allowance.concurrent == 3


def test_a_number_that_was_used_does_not_come_again(acl, capsys):
    new_key(acl, "search", "--models", "*")
    new_key(acl, "search")
    text = acl.read_text()
    first, second = (text.index(f'[[principals.search.keys]]\nid = "search-{number}"') for number in (1, 2))
    acl.write_text(text[:first] + text[second:])
    new_key(acl, "search")
    assert [key.id for key in read_acl(acl).principals["search"].keys] == ["search-2", "search-3"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["new"], "--models: new is new"),
        (["search", "--models", "*"], "--models: search is there already"),
        (["search", "--verbs", "admin"], "--verbs: search is there already"),
        (["search", "--id", "Not-An-Id"], "key id: must be"),
        (["@x", "--models", "*"], "is reserved"),
        (["x", "--models", "*", "--verbs", "fly"], "expected one of infer"),
        (["naïve", "--models", "*"], "namespace: must be"),
        (["x y", "--models", "*"], "without spaces"),
        (["\udcff", "--models", "*"], "UTF-8"),
    ],
)
def test_what_would_not_be_right_changes_nothing(acl, capsys, words, reason):
    acl.write_text(EXISTING)
    assert new_key(acl, *words) in (1, 2)
    out, err = capsys.readouterr()
    assert out == ""
    assert reason in err
    assert acl.read_text() == EXISTING


@pytest.mark.parametrize("form", ["keys = []\n", 'keys = [{id = "a", sha256 = "%s"}]\n' % ("0" * 64)])
def test_a_form_that_cannot_be_appended_to_is_said(acl, capsys, form):
    acl.write_text(EXISTING + form)
    assert new_key(acl, "search") == 1
    assert "only [principals.NAME] and [[principals.NAME.keys]] can be appended to" in capsys.readouterr().err
    assert acl.read_text() == EXISTING + form


@pytest.mark.parametrize("spoil", [lambda acl: acl.write_text("x"), lambda acl: acl.chmod(0o666)])
def test_a_file_that_is_refused_is_not_changed(acl, spoil):
    acl.write_text(EXISTING)
    spoil(acl)
    before = acl.read_text()
    assert new_key(acl, "search") == 1
    assert acl.read_text() == before


def test_an_odd_name_is_quoted(acl, capsys):
    assert new_key(acl, 'Ω"\\é', "--models", 'a"b\\*', "--namespace", "odd") == 0
    key = capsys.readouterr().out.strip()
    assert key.startswith("key-1.")
    assert read_acl(acl).find(key, now=0).principal == 'Ω"\\é'


names = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=20).filter(
    lambda n: n[0] != "@"
)
globs = st.lists(
    st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=10), min_size=1, max_size=3
)


@given(names, globs)
def test_whatever_a_principal_is_called_its_text_means_it(name, models):
    text = principal_text(name, NewPrincipal(models, "n", ("infer",)))
    found = parse_acl(text, "here").principals
    assert list(found) == [name]
    assert found[name].models == tuple(models)


def test_a_symbolic_link_stays_one(acl, tmp_path):
    real = tmp_path / "real" / "acl.toml"
    real.parent.mkdir()
    real.write_text(EXISTING)
    acl.symlink_to(real)
    assert new_key(acl, "search") == 0
    assert acl.is_symlink()
    assert len(read_acl(real).principals["search"].keys) == 1
    assert os.listdir(real.parent) == ["acl.toml"]


def test_show_only_writes_nothing(acl, capsys):
    acl.write_text(EXISTING)
    assert new_key(acl, "search", "--show-only") == 0
    out, err = capsys.readouterr()
    assert acl.read_text() == EXISTING
    pasted = parse_acl(EXISTING + err[err.index("[[") :], "pasted")
    assert pasted.find(out.strip(), now=0).principal == "search"


@pytest.mark.parametrize(
    ("text", "days"), [("90d", 90), ("1d", 1), ("2999-01-01", None), ("2999-01-01T02:00:00+02:00", None)]
)
def test_keys_expire_when_it_was_said(acl, text, days):
    assert new_key(acl, "a", "--models", "*", "--expires", text) == 0
    when = read_acl(acl).principals["a"].keys[0].expires
    if days is None:
        assert when == datetime(2999, 1, 1, tzinfo=UTC)
    else:
        assert abs(when - datetime.now(UTC) - timedelta(days=days)) < timedelta(minutes=5)


@pytest.mark.parametrize("text", ["0d", "-1d", "99999d", "soon", "2001-01-01", "2999-01-01T00:00:00", ""])
def test_a_time_that_is_none_is_refused(acl, text, capsys):
    with pytest.raises(SystemExit):
        new_key(acl, "a", "--models", "*", f"--expires={text}")
    assert "--expires: expected" in capsys.readouterr().err
    assert not acl.exists()


def test_a_full_disk_leaves_the_old_file_and_shows_no_credential(acl, capsys):
    acl.write_text(EXISTING)
    with room_for(len(EXISTING)):
        assert new_key(acl, "search") == 1
    assert capsys.readouterr().out == ""
    assert acl.read_text() == EXISTING
    assert os.listdir(acl.parent) == ["acl.toml"]


def test_an_edit_meanwhile_is_kept(acl):
    acl.write_text(EXISTING)
    edits = [EXISTING + "# edited\n"]

    def change(found):
        if edits:
            acl.write_text(edits.pop())
        return "# appended\n"

    append_to_acl(acl, change)
    assert acl.read_text() == EXISTING + "# edited\n\n# appended\n"


def test_edits_without_end_are_given_up(acl):
    acl.write_text(EXISTING)

    def change(found):
        acl.write_text(acl.read_text() + "#")
        return "# appended\n"

    with pytest.raises(Exception, match="changed again and again"):
        append_to_acl(acl, change)
    assert "appended" not in acl.read_text()


def test_a_lock_that_is_never_free_is_not_waited_for_for_ever(acl, monkeypatch):
    monkeypatch.setattr(acl_edit, "LOCK_S", 0.0)
    with acl_edit._turn(acl.parent), pytest.raises(Exception, match="has held its lock"):
        append_to_acl(acl, lambda found: "")


def test_many_at_once_lose_no_key(acl, tmp_path):
    acl.write_text(EXISTING)
    words = [sys.executable, "-m", "scripts.cli", "acl", "new-key", "search", "--acl", str(acl)]
    root = Path(__file__).resolve().parents[3]
    running = [
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=root)
        for _ in range(4)
    ]
    shown = [process.communicate(timeout=50)[0].strip() for process in running]
    found = read_acl(acl)
    assert sorted(found.find(key, now=0).key_id for key in shown) == [f"search-{i}" for i in (1, 2, 3, 4)]
    assert os.listdir(tmp_path) == ["acl.toml"]


def test_without_a_file_named_the_homes_is_meant(tmp_path, capsys):
    home = tmp_path / "home"
    home.mkdir()
    words = ["acl", "new-key", "a", "--home", str(home)]
    assert main([*words, "--models", "*"]) == 0
    (home / "tensorcache.toml").write_text('[access]\nacl = "other.toml"\n')
    assert main([*words, "--models", "*"]) == 0
    assert sorted(path.name for path in home.glob("*.toml")) == ["acl.toml", "other.toml", "tensorcache.toml"]
    assert main(["acl", "new-key", "a", "--home", str(tmp_path / "no")]) == 2


def test_key_text_shows_the_second_in_utc():
    from backend.access import new_key as make

    when = datetime(2999, 1, 1, 2, tzinfo=UTC)
    assert "expires = 2999-01-01T02:00:00Z\n" in key_text("a", make("a-1", expires=when)[1])
    with pytest.raises(ConfigError):
        make("a-1", expires=datetime(2999, 1, 1))
