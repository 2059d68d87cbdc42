"""What a file says, in words: whom a key is of, how long it is valid, and what in the file is of no use."""

import io
from datetime import UTC, datetime, timedelta

import pytest

from backend.access import new_key, parse_acl
from scripts.acl.acl_text import NewPrincipal, key_text, principal_text
from scripts.acl.found import key_state, warnings
from scripts.cli import main

NOW = datetime.now(UTC).replace(microsecond=0)


@pytest.fixture
def keys():
    return {
        "search-1": new_key("search-1"),
        "search-2": new_key("search-2", expires=NOW - timedelta(days=1)),
        "search-3": new_key("search-3", expires=NOW + timedelta(days=3, hours=1)),
    }


@pytest.fixture
def acl(tmp_path, keys):
    path = tmp_path / "acl.toml"
    table = NewPrincipal(["smollm2", "qwen*"])
    text = principal_text("search", table) + "requests_per_s = 50\nconcurrent = 32\n"
    path.write_text(text + "".join(key_text("search", entry) for _, entry in keys.values()))
    return path


@pytest.fixture
def key_file(tmp_path, keys):
    def write(key_id, mode=0o600):
        path = tmp_path / "key"
        path.write_text(f"{keys[key_id][0]}\n")
        path.chmod(mode)
        return str(path)

    return write


def check(acl, *words):
    return main(["acl", "check", "--acl", str(acl), "--home", str(acl.parent), *words])


def no_secret(keys, text):
    return not any(
        secret in text
        for credential, entry in keys.values()
        for secret in (credential.partition(".")[2], entry.sha256)
    )


def test_a_right_file_is_said_to_be_right(acl, keys, capsys):
    assert check(acl) == 0
    out, err = capsys.readouterr()
    assert "1 principal, 3 keys" in out
    assert "search: key search-2 has expired: delete its table" in err
    assert "search: key search-3 expires in 3 d" in err
    assert no_secret(keys, out + err)


def test_a_wrong_file_is_one_line_and_exit_code_1(acl, capsys):
    acl.write_text(acl.read_text() + "quota = 1\n")
    assert check(acl) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "keys[2].quota: unknown key" in err


def test_a_file_that_is_not_there_is_exit_code_1(tmp_path, capsys):
    assert check(tmp_path / "acl.toml") == 1
    assert "expected a readable acl file" in capsys.readouterr().err


def test_a_credential_is_told_whose_it_is(acl, keys, key_file, capsys):
    assert check(acl, "--key-file", key_file("search-3"), "--model", "qwen3") == 0
    out, err = capsys.readouterr()
    until = f"{NOW + timedelta(days=3, hours=1):%Y-%m-%d %H:%M} UTC"
    for line in (
        f"search, by the key search-3, until {until}", "namespace    search", "models       smollm2, qwen*",
        "verbs        cache.read, cache.write, infer", "limits       50 requests/s, 32 at once",
    ):  # fmt: skip
        assert line in out
    assert no_secret(keys, out + err)


def test_a_credential_may_come_from_standard_input(acl, keys, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(keys["search-1"][0] + "\n"))
    assert check(acl, "--key-file", "-") == 0
    assert "until it is taken out of the file" in capsys.readouterr().out


def test_what_a_server_would_refuse_is_refused_with_the_reason(acl, keys, key_file, tmp_path, capsys):
    assert check(acl, "--key-file", key_file("search-2")) == 1
    assert "expired (key search-2 of search)" in capsys.readouterr().err
    assert check(acl, "--key-file", key_file("search-1"), "--model", "llama") == 1
    assert "search may not use the model llama" in capsys.readouterr().err
    strangers = {
        "unknown key": new_key("search-9")[0],
        "wrong secret (key search-1 of search)": new_key("search-1")[0],
        "malformed": "search-1.short",
    }
    for reason, credential in strangers.items():
        (tmp_path / "stranger").write_text(credential)
        assert check(acl, "--key-file", str(tmp_path / "stranger")) == 1
        out, err = capsys.readouterr()
        assert reason in err
        assert credential.partition(".")[2] not in out + err


@pytest.mark.parametrize("content", ["", "two words", "two\nlines", "x" * 257])
def test_a_key_file_that_holds_none_is_not_quoted(acl, tmp_path, content, capsys):
    (tmp_path / "key").write_text(content)
    assert check(acl, "--key-file", str(tmp_path / "key")) == 2
    err = capsys.readouterr().err
    assert "expected one line, the credential" in err
    assert not content or content not in err


def test_a_key_file_that_others_may_read_is_said(acl, key_file, capsys):
    assert check(acl, "--key-file", key_file("search-1", 0o644)) == 0
    assert "others may read this credential (mode 0644)" in capsys.readouterr().err


def test_a_model_has_its_users(acl, capsys):
    assert check(acl, "--model", "smollm2") == 0
    assert "smollm2: search" in capsys.readouterr().out
    assert check(acl, "--model", "llama") == 1
    assert "no principal may use the model llama" in capsys.readouterr().err


def test_a_glob_that_matches_no_model_of_the_home_is_said(acl, capsys):
    model = acl.parent / "model_repository" / "smollm2"
    model.mkdir(parents=True)
    (model / "config.pbtxt").touch()
    assert check(acl) == 0
    err = capsys.readouterr().err
    assert "search: 'qwen*' matches no model there is" in err
    assert "'smollm2' matches" not in err


def test_the_list_shows_every_key_with_its_state_and_no_digest(acl, keys, capsys):
    assert main(["acl", "list", "--acl", str(acl)]) == 0
    out, err = capsys.readouterr()
    for word in ("search-1: valid", "search-2:", "expired", "search-3:", "50", "smollm2", "cache.read"):
        assert word in out
    assert no_secret(keys, out + err)


def test_the_state_of_a_key_counts_to_its_last_second():
    _, entry = new_key("a", expires=NOW)
    states = {
        gap: key_state(entry, NOW - timedelta(seconds=gap)) for gap in (-1, 0, 1, 3600, 86400, 3 * 86400)
    }
    assert states == {
        -1: "expired", 0: "expired", 1: "expires in 0 h", 3600: "expires in 1 h", 86400: "expires in 1 d",
        3 * 86400: "expires in 3 d",
    }  # fmt: skip


def test_a_principal_that_no_key_is_left_of_is_said():
    acl = parse_acl(principal_text("a", NewPrincipal(["*"])), "here")
    assert warnings(acl, (), NOW) == ["a: has no key that is valid, and cannot do anything"]
