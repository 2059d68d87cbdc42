"""Tenants of one server: what each sees of the others, which is nothing, and what an admin gives to all."""

import json
import time
from collections.abc import Callable

import pytest
import tritonclient.grpc

from backend.access import new_key
from scripts.cli import main
from scripts.triton_stream import tensor
from tests.e2e.conftest import FACADE, MODEL
from tests.e2e.guarded import Guarded

LIMIT_S = 15.0
DENIED = "access denied: the credential is missing or not valid for this request"
PROMPT = list(range(1, 200))


@pytest.fixture(scope="module")
def tenants(guarded: Guarded) -> dict[str, str]:
    """Added to the acl file of a server that runs: no restart."""
    made = {name: new_key(f"{name}-1") for name in ("a", "b", "shy", "root", "onlooker", "metered")}
    more = {
        "shy": 'namespace = "a"\nhide_cached_tokens = true',
        "root": 'verbs = ["admin"]',
        "onlooker": 'namespace = "a"\nverbs = ["infer", "cache.read"]',
        "metered": "requests_per_s = 0.0001",
    }
    with guarded.keys.file.open("a") as file:
        for name, (_, entry) in made.items():
            file.write(f'[principals.{name}]\nmodels = ["{MODEL}"]\n{more.get(name, "")}\n')
            file.write(f'[[principals.{name}.keys]]\nid = "{entry.id}"\nsha256 = "{entry.sha256}"\n')
        file.write("[namespaces.b]\nquota = 0.5\nmin_share = 0.25\n")
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


CLAIMS = ("namespace", "principal", "tenant", "user", "x-principal", "triton_principal", "triton_namespace")


@pytest.mark.parametrize("model", [MODEL, FACADE])
def test_nobody_gets_into_a_namespace_by_saying_so(
    guarded: Guarded, tenants: dict[str, str], model: str
) -> None:
    """Refused as unknown, or, where a name is Triton's own, not read."""
    taken = {}
    for number, claim in enumerate(CLAIMS):
        prompt = [number + 2, *range(300 + len(model), 102 + len(model), -1)]
        assert ask(guarded, tenants["a"], prompt)[0] == 0
        body = {"input_ids": prompt, "max_tokens": 1, "api_key": tenants["b"], claim: "a"}
        status, text = guarded.post(f"/v2/models/{model}/generate", body)
        taken[claim] = status == 200
        if status == 200:
            assert json.loads(text)["num_cached_tokens"] == 0, text
        else:
            assert f"{claim}: is not a parameter of this model" in text
        assert ask(guarded, tenants["onlooker"], prompt)[0] == 192, "it was there to be had"
    assert taken == {claim: claim.startswith("triton_") for claim in CLAIMS}


def test_whoever_may_only_read_leaves_nothing(guarded: Guarded, tenants: dict[str, str]) -> None:
    prompt = list(range(7, 207))
    assert [ask(guarded, tenants["onlooker"], prompt)[0] for _ in range(2)] == [0, 0]
    assert ask(guarded, tenants["a"], prompt)[0] == 0
    assert ask(guarded, tenants["onlooker"], prompt)[0] == 192


def told_cached(guarded: Guarded, key: str, prompt: list[int]) -> dict[str, int]:
    """What each way of asking says of it."""
    body = {"input_ids": prompt, "max_tokens": 2, "api_key": key}
    _, events = guarded.post(f"/v2/models/{MODEL}/generate_stream", {**body, "stream": True})
    last = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: ")][-1]
    tensors = [tensor("input_ids", prompt), tensor("max_tokens", 2)]
    with tritonclient.grpc.InferenceServerClient(guarded.triton.grpc_url) as client:
        answer = client.infer(FACADE, tensors, headers={"authorization": f"Bearer {key}"}, client_timeout=30)
    return {
        "generate": ask(guarded, key, prompt)[0],
        "stream": last["num_cached_tokens"],
        "facade": ask(guarded, key, prompt, model=FACADE)[0],
        "gRPC": int(answer.as_numpy("num_cached_tokens")[0]),
    }


def test_what_was_cached_is_hidden_from_whom_it_is_to_be_hidden(
    guarded: Guarded, tenants: dict[str, str]
) -> None:
    prompt = list(range(11, 211))
    ask(guarded, tenants["a"], prompt)
    shown = [told_cached(guarded, tenants[name], prompt) for name in ("shy", "a")]
    assert shown == [dict.fromkeys(shown[0], 0), dict.fromkeys(shown[0], 192)]


def test_a_namespace_has_the_share_that_the_file_gives_it(guarded: Guarded, tenants: dict[str, str]) -> None:
    def held() -> dict[str, dict[str, float]]:
        answer: dict[str, dict[str, float]] = told(guarded, tenants["root"], {"command": "namespaces"})[
            "namespaces"
        ]  # type: ignore[assignment]
        return answer

    before = held()["b"]
    assert (before["quota"], before["min_share"]) == (0.5, 0.25)
    ask(guarded, tenants["b"], list(range(21, 221)))
    assert held()["b"]["blocks"] == before["blocks"] + 12
    assert "onlooker" not in held(), "whoever writes nothing needs no room"


def test_who_asks_for_more_than_the_file_allows_is_told_the_limit(
    guarded: Guarded, tenants: dict[str, str]
) -> None:
    key = tenants["metered"]
    assert guarded.generate(key)[0] == 200
    for model in (MODEL, FACADE):
        status, text = guarded.generate(key, model=model)
        assert "principals.metered.requests_per_s: at most 0.0001 requests a second" in text
        assert (status, key.partition(".")[2] in text) == (400, False)
    assert "principals.metered.requests_per_s" in guarded.grpc_stream({"authorization": f"Bearer {key}"})
    assert guarded.generate(tenants["a"])[0] == 200


def test_tag_secrets_rotate_while_it_serves(guarded: Guarded, tenants: dict[str, str]) -> None:
    old, new = list(range(31, 231)), list(range(41, 241))
    ask(guarded, tenants["a"], old)
    secrets = guarded.triton.home.root / "secrets"
    assert main(["secret", "new", str(secrets), "--rotate"]) == 0
    log = guarded.triton.home.root / "triton.log"
    wait_until(lambda: "blocks are sealed with key id 2; of the older ones 1 is read" in log.read_text())
    assert [ask(guarded, tenants["a"], prompt)[0] for prompt in (old, new, new)] == [192, 0, 192]
    kept = [(secrets / f"tag-{number}.key").read_text().strip() for number in (1, 2)]
    assert not [secret for secret in kept if secret in log.read_text()]


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
    _, text = guarded.generate(None, triton_call="0" * 32)  # what only a facade writes
    assert json.loads(text)["text_output"] == DENIED, "and not which process it is"
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
