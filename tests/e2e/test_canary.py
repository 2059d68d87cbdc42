"""A credential is sent in every way there is, a good one and a bad one, and then looked for in all we keep.

The server logs and traces as much as it can. Every way has a credential of its own, so that one that is found
tells how it got there.
"""

import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.guarded import Guarded
from tests.waiting import wait_until

OURS = re.compile(r"[DIWEC] \d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [a-z_.]+: ")
"""How a line of our log begins."""

Ask = Callable[[Guarded, str], str]


def generate(**more: object) -> Ask:
    """/generate with the credential wherever `more` says CREDENTIAL, else as api_key."""

    def ask(guarded: Guarded, credential: str) -> str:
        fields = json.loads(json.dumps(more or {"api_key": "CREDENTIAL"}).replace("CREDENTIAL", credential))
        return guarded.generate(None, **fields)[1]

    return ask


def bearer(credential: str) -> str:
    return f"Bearer {credential}"


GOOD: dict[str, Ask] = {
    "generate api_key": generate(),
    "generate_stream api_key": lambda g, key: g.post(
        "/v2/models/smollm2/generate_stream", {"text_input": "Hi", "max_tokens": 1, "api_key": key}
    )[1],
    "facade generate api_key": lambda g, key: g.generate(key, model="smollm2_sync")[1],
    "facade infer api_key": lambda g, key: g.infer(body={"parameters": {"api_key": key}})[1],
    "facade infer header": lambda g, key: g.infer(authorization=bearer(key))[1],
    "facade infer header in capitals": lambda g, key: g.infer(AUTHORIZATION=bearer(key))[1],
    "gRPC infer metadata": lambda g, key: g.grpc_infer({"authorization": bearer(key)}),
    "gRPC infer api_key": lambda g, key: g.grpc_infer(api_key=key),
    "gRPC stream metadata": lambda g, key: g.grpc_stream({"authorization": bearer(key)}),
    "gRPC stream api_key": lambda g, key: g.grpc_stream(api_key=key),
    "twice, and the same": lambda g, key: g.grpc_infer({"authorization": bearer(key)}, api_key=key),
}
"""Ways that let a good credential in."""

BAD: dict[str, Ask] = {
    **{f"unknown: {name}": ask for name, ask in GOOD.items()},
    "generate header": lambda g, key: g.post(
        "/v2/models/smollm2/generate", {"text_input": "Hi"}, {"authorization": bearer(key)}
    )[1],
    "misspelt parameter": generate(apikey="CREDENTIAL"),
    "misspelt gRPC parameter": lambda g, key: g.grpc_stream(**{"api-key": key}),
    "misspelt facade parameter": lambda g, key: g.grpc_infer(apikey=key),
    "another header": lambda g, key: g.infer(**{"x-api-key": key})[1],
    "another scheme": lambda g, key: g.infer(authorization=f"Basic {key}")[1],
    "no scheme": lambda g, key: g.grpc_stream({"authorization": key}),
    "twice, and different": lambda g, key: g.grpc_infer({"authorization": bearer(f"{key}x")}, api_key=key),
    "two spellings": generate(api_key="CREDENTIAL", API_KEY="CREDENTIALx"),
    "a list": generate(api_key=["CREDENTIAL"]),
    "an object": generate(api_key={"CREDENTIAL": "CREDENTIAL"}),
    "too long": generate(api_key="CREDENTIAL" * 40),
    "with a line break": generate(api_key="CREDENTIAL\nE 2026-01-01 00:00:00,000 forged: CREDENTIAL"),
    "as a number": generate(api_key="x", max_tokens="CREDENTIAL"),
    "as a timeout": generate(api_key="x", timeout="CREDENTIAL"),
    "as an identity": generate(principal="CREDENTIAL", namespace="CREDENTIAL"),
    "in the query": lambda g, key: g.post(
        f"/v2/models/smollm2/generate?api_key={key}", {"text_input": "Hi"}
    )[1],
    "in sampling_parameters": generate(sampling_parameters='{"api_key": "CREDENTIAL"}'),
    "as the probe's": generate(api_key="@probe.CREDENTIAL", triton_probe=True),
}  # fmt: skip
"""Ways that let nobody in."""

MISTAKEN: dict[str, Ask] = {
    f"{name}, beside a good one": lambda g, key, fields=fields: g.generate(
        g.keys.credentials["reader-1"],
        **{name: value.replace("CREDENTIAL", key) for name, value in fields.items()},
    )[1]
    for name, fields in {
        "misspelt parameter": {"apikey": "CREDENTIAL"},
        "in sampling_parameters": {"sampling_parameters": '{"api_key": "CREDENTIAL"}'},
        "as a timeout": {"timeout": "CREDENTIAL"},
    }.items()
}
"""Who may ask puts it where no credential belongs."""

OTHERS = ("expired", "for another model")
IN_TENSORS = ["in sampling_parameters", "in sampling_parameters, beside a good one"]
"""An input like the prompt: Triton's trace holds it as it holds the prompt, where somebody turns that on."""

ECHOED = "as a timeout, beside a good one"
"""A value that is wrong is told to whoever sent it, and to nobody else."""


@dataclass(frozen=True)
class Sent:
    """What was sent, and what came back, by way."""

    secrets: dict[str, str]
    answers: dict[str, str]

    def found_in(self, text: str) -> list[str]:
        """The ways whose secret is there."""
        return [way for way, secret in self.secrets.items() if secret in text]


@pytest.fixture(scope="module")
def sent(guarded: Guarded) -> Sent:
    """Every way, once. The secret is what follows the id."""
    credentials = dict(
        zip(GOOD, (guarded.keys.credentials[f"reader-{number}"] for number in range(2, 13)), strict=True)
    )
    for way in [*BAD, *MISTAKEN]:
        credentials[way] = f"reader-1.{secrets.token_urlsafe(32)}"
    credentials |= {"expired": guarded.keys.credentials["reader-old"],
                    "for another model": guarded.keys.credentials["stranger-2"]}  # fmt: skip
    ways = {**GOOD, **BAD, **MISTAKEN, **dict.fromkeys(OTHERS, generate())}
    answers = {way: ask(guarded, credentials[way]) for way, ask in ways.items()}
    traces = len(list(guarded.trace.iterdir()))
    assert guarded.serves()
    wait_until(lambda: len(list(guarded.trace.iterdir())) > traces)  # those before are on disk, too
    return Sent({way: credential.partition(".")[2] for way, credential in credentials.items()}, answers)


@pytest.mark.parametrize("way", GOOD)
def test_a_good_credential_is_let_in(sent: Sent, way: str) -> None:
    assert "finish_reason" in sent.answers[way]


@pytest.mark.parametrize("way", [*BAD, *MISTAKEN, *OTHERS])
def test_a_bad_one_is_not(sent: Sent, way: str) -> None:
    assert "finish_reason" not in sent.answers[way]


def test_every_refusal_of_ours_is_the_same_text(sent: Sent) -> None:
    """But for what Triton refuses before we see it."""
    denied = "access denied: the credential is missing or not valid for this request"
    told = {way: sent.answers[way] for way in [*BAD, *OTHERS]}
    by_triton = {way for way, text in told.items() if denied not in text}
    assert by_triton == {"a list", "an object", "as a number"}, {way: told[way] for way in by_triton}


def test_no_answer_has_a_credential(sent: Sent) -> None:
    for way, text in sent.answers.items():
        assert sent.found_in(text) == ([way] if way == ECHOED else []), way


def test_no_line_of_the_log_has_one(guarded: Guarded, sent: Sent) -> None:
    lines = (guarded.triton.home.root / "triton.log").read_text().splitlines()
    ours = [line for line in lines if OURS.match(line)]
    assert any("refused id=" in line and "reason=" in line for line in ours), "refusals are there"
    assert any("/generate" in line for line in lines if not OURS.match(line)), "and Triton says a lot"
    assert sent.found_in("\n".join(ours)) == []
    assert sent.found_in("\n".join(lines)) == [], "nor does Triton's own log, at this version"
    assert not [line for line in ours if "forged" in line]
    assert sent.found_in("\n".join(guarded.triton.command.lines)) == []


def test_the_metrics_have_none(guarded: Guarded, sent: Sent) -> None:
    assert sent.found_in(guarded.triton.http.metrics()) == []


def test_no_file_of_ours_has_one(guarded: Guarded, sent: Sent) -> None:
    """The whole serving home, acl.toml among it, and the arenas."""
    arenas = guarded.triton.home.arenas()
    assert arenas
    home = guarded.triton.home.root
    for path in [*arenas, *(path for path in home.rglob("*") if path.is_file())]:
        assert found_in_file(sent, path) == [], path


def test_the_trace_has_what_is_in_tensors_and_no_parameters(guarded: Guarded, sent: Sent) -> None:
    """So it holds prompts and answers: it is off unless an operator turns it on, and theirs alone to read."""
    text = "".join(path.read_text() for path in guarded.trace.iterdir())
    assert "TENSOR_QUEUE_INPUT" in text
    assert sent.found_in(text) == IN_TENSORS
    assert {path.stat().st_mode & 0o077 for path in guarded.trace.iterdir()} == {0}


def test_what_triton_shares_with_its_models_is_closed_to_other_users(guarded: Guarded) -> None:
    """It holds requests and their credentials; Triton itself makes it readable for all."""
    for stub in guarded.triton.stubs():
        region = Path(f"/proc/{stub.pid}/cmdline").read_text().split("\0")[2]
        assert (Path("/dev/shm") / region).stat().st_mode & 0o077 == 0, stub.model


def found_in_file(sent: Sent, path: Path) -> list[str]:
    data = path.read_bytes()
    return [way for way, secret in sent.secrets.items() if secret.encode() in data]
