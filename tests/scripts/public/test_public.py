"""An admin's commands to running servers: what is sent, and what is said of the answers."""

import io
import json

import pytest

from scripts.cli import main
from tests.scripts.standin_server import standin_server

KEY = "ops-1." + "k" * 43
ADDED = {"name": "handbook", "tokens": 70, "blocks": 2, "added": True}
DENIED = "access denied: the credential is missing or not valid for this request"


@pytest.fixture
def server():
    with standin_server() as made:
        made.says = ADDED
        made.answer_as = None
        usual = made.answer

        def answer(path, body):
            status, text = usual(path, body)
            made.path = path
            if status != 200:
                return status, text
            return 200, made.answer_as or json.dumps({"text_output": json.dumps(made.says)})

        made.answer = answer
        yield made


@pytest.fixture
def key(tmp_path):
    file = tmp_path / "ops.key"
    file.write_text(KEY)
    file.chmod(0o600)
    return ["--key-file", str(file)]


@pytest.fixture
def public(server, key):
    def run(*words, urls=None):
        places = [word for url in urls or [server.words[1]] for word in ("--url", url)]
        return main(["public", *words, "--model", "small", *places, *key])

    return run


@pytest.fixture
def file(tmp_path):
    def write(content):
        path = tmp_path / "prompt"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


@pytest.mark.parametrize(
    ("option", "content", "sent"),
    [
        ("--file", "Be kind.\n", {"text_input": "Be kind.\n"}),
        ("--messages", '[{"role": "system", "content": "Ω"}]',
         {"messages": '[{"role": "system", "content": "Ω"}]'}),
        ("--ids", "[1, 2, 3]", {"input_ids": [1, 2, 3]}),
    ],
)  # fmt: skip
def test_a_prefix_is_sent_as_a_prompt_is(public, server, file, option, content, sent, capsys):
    assert public("add", "handbook", option, file(content)) == 0
    command = {"command": "public.add", "name": "handbook"}
    (asked,) = server.asked
    assert json.loads(asked.pop("admin")) == command
    assert asked == {**sent, "api_key": KEY}
    assert server.path == "/v2/models/small/generate"
    out, err = capsys.readouterr()
    assert out == f"{server.words[1]}  added handbook, 70 tokens, 2 blocks are shared\n"
    assert KEY not in out + err


def test_the_same_again_is_said(public, server, file, capsys):
    server.says = {**ADDED, "added": False}
    assert public("add", "handbook", "--file", file("x")) == 0
    assert "was public already: handbook" in capsys.readouterr().out


def test_list_and_remove(public, server, capsys):
    one = {"name": "handbook", "tokens": 70, "registered": "2026-11-30T08:00:00+00:00", "by": "ops"}
    server.says = {"public": [one]}
    assert public("list") == 0
    out = capsys.readouterr().out
    assert "1 public" in out
    assert "handbook" in out
    assert "by ops" in out
    server.says = {"removed": "handbook"}
    assert public("remove", "handbook") == 0
    assert capsys.readouterr().out.endswith("removed handbook\n")
    assert [json.loads(asked["admin"])["command"] for asked in server.asked] == [
        "public.list",
        "public.remove",
    ]


def test_a_node_that_is_not_there_keeps_nothing_from_the_others(public, server, file, capsys):
    urls = ["127.0.0.1:1", server.words[1]]
    assert public("add", "handbook", "--file", file("x"), urls=urls) == 1
    out, err = capsys.readouterr()
    assert f"{server.words[1]}  added handbook" in out
    assert "127.0.0.1:1: no answer: " in err
    assert "name a server that runs with --url" in err


@pytest.mark.parametrize("error", [DENIED, "admin.name: must be given", "x" * 500, "line\nline\x1b[31m"])
def test_a_refusal_is_one_line_without_the_key(public, server, error, capsys):
    server.error = error
    assert public("list") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "\x1b" not in err
    assert KEY not in err
    assert ("verb admin" in err) == (error == DENIED)


@pytest.mark.parametrize(
    "answer", ["", "[]", '{"text_output": "Hello"}', '{"text_output": "[]"}', '{"text_output": "{}"}']
)
def test_an_answer_of_something_else_is_no_success(public, server, answer, capsys):
    server.answer_as = answer or "no"
    assert public("list") == 1
    assert "the answer is none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "content", "words"),
    [
        ("--file", b"\xff", "expected UTF-8"),
        ("--file", b"x" * ((8 << 20) + 1), "at most 8388608 bytes"),
        ("--messages", "no", "expected JSON"),
        ("--messages", "{}", "expected a JSON list"),
        ("--ids", "[]", "not empty"),
        ("--ids", "[true]", "expected token ids"),
        ("--ids", "[-1]", "expected token ids"),
        ("--ids", "[2147483648]", "expected token ids"),
    ],
)
def test_a_file_that_is_no_prompt_is_not_sent(public, server, file, option, content, words, capsys):
    assert public("add", "handbook", option, file(content)) == 2
    assert words in capsys.readouterr().err
    assert server.asked == []


def test_a_file_that_is_not_there_is_said(public, server, tmp_path, capsys):
    assert public("add", "handbook", "--file", str(tmp_path / "no")) == 1
    assert "no: No such file" in capsys.readouterr().err
    assert server.asked == []


def test_the_key_may_come_from_standard_input(server, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(KEY + "\n"))
    server.says = {"public": []}
    assert main(["public", "list", "--model", "small", *server.words[:2], "--key-file", "-"]) == 0
    assert server.asked[0]["api_key"] == KEY


def test_a_model_of_any_name_is_one_part_of_the_path(public, server, key):
    server.says = {"public": []}
    main(["public", "list", "--model", "../x y", *server.words[:2], *key])
    assert server.path == "/v2/models/..%2Fx%20y/generate"


def test_a_key_among_the_arguments_is_refused_and_not_repeated(server, capsys):
    assert main(["public", "list", "--model", "small", *server.words[:2], "--key-file", KEY]) == 2
    out, err = capsys.readouterr()
    assert "--key-file: names a file" in err
    assert KEY[6:] not in out + err
    assert server.asked == []
