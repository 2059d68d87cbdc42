"""Tenants of one server: what each sees of the others, which is nothing, and what an admin gives to all."""

import json
import time
from collections.abc import Callable

import pytest

from backend.access import new_key
from tests.e2e.conftest import FACADE, MODEL
from tests.e2e.guarded import Guarded

LIMIT_S = 15.0
DENIED = "access denied: the credential is missing or not valid for this request"
PROMPT = list(range(1, 200))


@pytest.fixture(scope="module")
def tenants(guarded: Guarded) -> dict[str, str]:
    """Added to the acl file of a server that runs: no restart."""
    made = {name: new_key(f"{name}-1") for name in ("a", "b", "shy", "root", "onlooker")}
    more = {
        "shy": 'namespace = "a"\nhide_cached_tokens = true',
        "root": 'verbs = ["admin"]',
        "onlooker": 'namespace = "a"\nverbs = ["infer", "cache.read"]',
    }
    with guarded.keys.file.open("a") as file:
        for name, (_, entry) in made.items():
            file.write(f'[principals.{name}]\nmodels = ["{MODEL}"]\n{more.get(name, "")}\n')
            file.write(f'[[principals.{name}.keys]]\nid = "{entry.id}"\nsha256 = "{entry.sha256}"\n')
    keys = {name: credential for name, (credential, _) in made.items()}
    wait_until(lambda: told(guarded, keys["root"], {"command": "whoami"})["principal"] == "root")
    return keys


def wait_until(is_so: Callable[[], bool]) -> None:
    """Files are looked at about once a second."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            if is_so():
                return
            problem = "it is not so"
        except AssertionError as error:
            problem = str(error)
        assert time.monotonic() < deadline, f"not within {LIMIT_S} s: {problem}"
        time.sleep(0.05)


def told(guarded: Guarded, key: str, command: object, **prompt: object) -> dict[str, object]:
    """An admin's answer."""
    body = {"api_key": key, "admin": json.dumps(command), **prompt}
    status, text = guarded.post(f"/v2/models/{MODEL}/generate", body)
    assert status == 200, text
    answer: dict[str, object] = json.loads(json.loads(text)["text_output"])
    return answer


def ask(
    guarded: Guarded, key: str, prompt: list[int] = PROMPT, *, model: str = MODEL
) -> tuple[int, list[int]]:
    """Cached tokens, and the answer."""
    body = {"input_ids": prompt, "max_tokens": 4, "api_key": key}
    status, text = guarded.post(f"/v2/models/{model}/generate", body)
    assert status == 200, text
    answer = json.loads(text)
    return answer["num_cached_tokens"], answer["output_ids"]


def test_a_prompt_is_warm_in_its_own_namespace_and_cold_in_every_other(
    guarded: Guarded, tenants: dict[str, str]
) -> None:
    answers = [ask(guarded, tenants[name]) for name in ("a", "b", "a", "b")]
    assert [cached for cached, _ in answers] == [0, 0, 192, 192]
    assert len({tuple(ids) for _, ids in answers}) == 1
    assert ask(guarded, tenants["a"], model=FACADE)[0] == 192, "the facade forwards the credential"


def test_nobody_gets_into_a_namespace_by_saying_so(guarded: Guarded, tenants: dict[str, str]) -> None:
    prompt = list(range(300, 100, -1))
    assert ask(guarded, tenants["a"], prompt)[0] == 0
    for claim in ("namespace", "principal", "tenant", "x-principal", "triton_principal"):
        body = {"input_ids": prompt, "max_tokens": 1, "api_key": tenants["b"], claim: "a", "no_cache": False}
        status, text = guarded.post(f"/v2/models/{MODEL}/generate", body)
        if status == 200:
            assert json.loads(text)["num_cached_tokens"] in (0, 192), text
        else:
            assert f"{claim}: is not a parameter of this model" in text
        ask(guarded, tenants["b"], [*prompt[1:], 7])  # other names: what b has of its own does not help
    assert ask(guarded, tenants["onlooker"], prompt)[0] == 192


def test_whoever_may_only_read_leaves_nothing(guarded: Guarded, tenants: dict[str, str]) -> None:
    prompt = list(range(7, 207))
    assert [ask(guarded, tenants["onlooker"], prompt)[0] for _ in range(2)] == [0, 0]
    assert ask(guarded, tenants["a"], prompt)[0] == 0
    assert ask(guarded, tenants["onlooker"], prompt)[0] == 192


def test_what_was_cached_is_hidden_from_whom_it_is_to_be_hidden(
    guarded: Guarded, tenants: dict[str, str]
) -> None:
    prompt = list(range(11, 211))
    ask(guarded, tenants["a"], prompt)
    assert ask(guarded, tenants["shy"], prompt)[0] == 0
    assert ask(guarded, tenants["a"], prompt)[0] == 192


def test_a_public_prefix_is_computed_once_for_all_and_what_follows_for_each(
    guarded: Guarded, tenants: dict[str, str]
) -> None:
    prefix = list(range(310, 210, -1))  # six whole blocks of 16, and a bit
    prompt = [*prefix, *range(1, 100)]
    command = {"command": "public.add", "name": "handbook"}
    assert told(guarded, tenants["root"], command, input_ids=prefix)["blocks"] == 6
    try:
        wait_until(lambda: guarded.generate(tenants["a"])[0] == 200)
        answers = [ask(guarded, tenants[name], prompt) for name in ("a", "b", "a", "b")]
        assert [cached for cached, _ in answers] == [0, 96, 192, 192]
        assert len({tuple(ids) for _, ids in answers}) == 1
    finally:
        told(guarded, tenants["root"], {"command": "public.remove", "name": "handbook"})
    assert ask(guarded, tenants["a"], prompt)[0] == 0, "under its own names it was never computed"


def test_a_refusal_says_nothing_and_is_written_down_without_the_key(
    guarded: Guarded, tenants: dict[str, str]
) -> None:
    refused = guarded.triton.metric("requests_refused_total", reason="AccessDenied")
    wrong = tenants["a"][:-1] + ("A" if tenants["a"][-1] != "A" else "B")
    errors = [
        guarded.generate(None),
        guarded.generate(wrong),
        guarded.generate("nobody-1." + "A" * 43),
        guarded.generate(guarded.keys.credentials["stranger-1"]),
        guarded.generate(tenants["root"]),
        guarded.generate(tenants["a"], admin='{"command": "whoami"}'),
        guarded.generate(tenants["a"], authorization="Bearer " + tenants["b"]),
    ]
    assert {(status, json.loads(text)["error"]) for status, text in errors} == {(400, DENIED)}
    log = guarded.triton.home.root / "triton.log"
    for reason in ("missing", "wrong_secret", "unknown_key", "model", "verb", "ambiguous"):
        wait_until(lambda reason=reason: f"reason={reason}" in log.read_text())
    ours = [line for line in log.read_text().splitlines() if "backend.access.audit" in line]
    assert not [line for line in ours if wrong.split(".")[1] in line]
    so_far = refused + len(errors)
    wait_until(lambda: guarded.triton.metric("requests_refused_total", reason="AccessDenied") >= so_far)


def test_a_key_that_is_taken_out_of_the_file_opens_nothing_any_more(
    guarded: Guarded, tenants: dict[str, str]
) -> None:
    entry = new_key("brief-1")
    text = guarded.keys.file.read_text()
    guarded.keys.file.write_text(
        f'{text}[principals.brief]\nmodels = ["*"]\n[[principals.brief.keys]]\nid = "brief-1"\n'
        f'sha256 = "{entry[1].sha256}"\n'
    )
    wait_until(lambda: guarded.generate(entry[0])[0] == 200)
    guarded.keys.file.write_text(text + "[broken")
    wait_until(lambda: "what was in force stays so" in (guarded.triton.home.root / "triton.log").read_text())
    assert guarded.generate(entry[0])[0] == 200, "a broken edit keeps the old one"
    guarded.keys.file.write_text(text)
    wait_until(lambda: guarded.generate(entry[0])[0] == 400)
    assert guarded.generate(tenants["a"])[0] == 200
