"""Triton's own doors are closed without the admin key; ours opens for the node's own probes."""

import json
from http.client import HTTPConnection
from pathlib import Path

import pytest
import tritonclient.grpc

from scripts.backend_layout import write_node_config
from scripts.cli import main
from scripts.node_keys import probe_key
from tests.e2e.conftest import FACADE, MODEL
from tests.e2e.guarded import RELEASE, Guarded

NEEDS_KEY: list[tuple[str, str, object]] = [
    ("POST", "/v2/repository/index", {}),
    ("POST", "/v2/repository/models/nobody/load", {}),
    ("POST", "/v2/repository/models/nobody/unload", {}),
    ("POST", "/v2/repository/some/models/nobody/load", {}),
    ("GET", "/v2/trace/setting", None),
    ("POST", "/v2/trace/setting", {}),
    ("GET", f"/v2/models/{MODEL}/trace/setting", None),
    ("POST", f"/v2/models/{MODEL}/trace/setting", {}),
    ("GET", "/v2/logging", None),
    ("POST", "/v2/logging", {}),
    *(
        (method, f"/v2/{kind}sharedmemory/{rest}", body)
        for kind in ("system", "cuda")
        for method, rest, body in (
            ("GET", "status", None),
            ("GET", "region/x/status", None),
            ("POST", "region/x/register", {"key": "/x", "offset": 0, "byte_size": 8}),
            ("POST", "region/x/unregister", {}),
            ("POST", "unregister", {}),
        )
    ),
    ("GET", "/v2/models/stats", None),
    ("GET", f"/v2/models/{MODEL}/stats", None),
    ("GET", f"/v2/models/{MODEL}/versions/1/stats", None),
]
OPEN = ["/v2", "/v2/health/live", "/v2/health/ready", f"/v2/models/{MODEL}", f"/v2/models/{MODEL}/ready",
        f"/v2/models/{MODEL}/config"]  # fmt: skip

GRPC: list[tuple[str, tuple[object, ...]]] = [
    ("get_model_repository_index", ()),
    ("load_model", ("nobody",)),
    ("unload_model", ("nobody",)),
    ("get_trace_settings", ()),
    ("get_trace_settings", (MODEL,)),
    ("update_trace_settings", (None, {})),
    ("update_trace_settings", (MODEL, {})),
    ("get_log_settings", ()),
    ("update_log_settings", ({},)),
    ("get_system_shared_memory_status", ()),
    ("register_system_shared_memory", ("x", "/x", 8)),
    ("unregister_system_shared_memory", ()),
    ("unregister_system_shared_memory", ("x",)),
    ("get_cuda_shared_memory_status", ()),
    ("register_cuda_shared_memory", ("x", b"abcd", 0, 8)),
    ("unregister_cuda_shared_memory", ()),
    ("unregister_cuda_shared_memory", ("x",)),
    ("get_inference_statistics", ()),
]
GRPC_HEADER = "triton-grpc-protocol-admin-key"
RESTRICTED = "restricted, expecting header"


Headers = tuple[tuple[str, str], ...]


def asked(guarded: Guarded, method: str, path: str, body: object, headers: Headers = ()) -> tuple[int, str]:
    """Headers as they are written, twice if they are there twice."""
    connection = HTTPConnection("127.0.0.1", guarded.triton.address.http_port, timeout=30)
    data = b"" if body is None else json.dumps(body).encode()
    try:
        connection.putrequest(method, path)
        connection.putheader("Content-Length", str(len(data)))
        for name, value in headers:
            connection.putheader(name, value)
        connection.endheaders(data)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def grpc_asked(guarded: Guarded, call: str, words: tuple[object, ...], headers: dict[str, str]) -> str:
    """The error, or nothing."""
    with tritonclient.grpc.InferenceServerClient(guarded.triton.grpc_url) as client:
        try:
            getattr(client, call)(*words, headers=headers)
        except tritonclient.grpc.InferenceServerException as error:
            return str(error)
    return ""


@pytest.mark.parametrize(("method", "path", "body"), NEEDS_KEY, ids=[" ".join(row[:2]) for row in NEEDS_KEY])
def test_an_http_door_opens_with_the_key_alone(
    guarded: Guarded, method: str, path: str, body: object
) -> None:
    key = guarded.admin_key
    reader = guarded.keys.credentials["reader-1"]
    for wrong in (
        (), (("admin-key", ""),), (("admin-key", key[:-1]),), (("admin-key", f"{key}0"),),
        (("admin-key", key.upper()),), (("admin-key", reader),), (("authorization", f"Bearer {key}"),),
        (("api_key", key),), (("admin-key", "x"), ("admin-key", key)),
    ):  # fmt: skip
        status, text = asked(guarded, method, path, body, wrong)
        assert (status, RESTRICTED in text) == (403, True), (wrong, text)
        assert key not in text
    status, text = asked(guarded, method, path, body, (("Admin-Key", key),))
    assert status != 403, text
    assert RESTRICTED not in text


@pytest.mark.parametrize(("call", "words"), GRPC, ids=[f"{row[0]}{len(row[1])}" for row in GRPC])
def test_a_grpc_door_opens_with_the_key_alone(guarded: Guarded, call: str, words: tuple[object, ...]) -> None:
    key = guarded.admin_key
    for wrong in ({}, {GRPC_HEADER: key[:-1]}, {"admin-key": key}, {"authorization": f"Bearer {key}"}):
        assert RESTRICTED in grpc_asked(guarded, call, words, wrong), wrong
    assert RESTRICTED not in grpc_asked(guarded, call, words, {GRPC_HEADER: key})


@pytest.mark.parametrize(
    "path",
    [
        "/v2//repository/index", "//v2/repository/index", "/V2/repository/index", "/v2/repository/index/",
        "/v2/repository/index?x=1", "/v2/./repository/index", "/v2/x/../repository/index",
        "/v2/%72epository/index", "/v2/repository%2Findex", "/v2/repository/index;x",
        "/v2/repository/index%00",
        f"/v2/models/{MODEL}/../../repository/index", "http://127.0.0.1/v2/repository/index",
        f"/v2/models/{MODEL}/load", f"/v2/repository/models/{MODEL}/versions/1/unload",
    ],
)  # fmt: skip
def test_no_other_spelling_of_a_door_is_open(guarded: Guarded, path: str) -> None:
    status, text = asked(guarded, "POST", path, {})
    assert status in (403, 404, 405), text
    assert MODEL not in text


@pytest.mark.parametrize("path", OPEN)
def test_what_clients_need_stays_open(guarded: Guarded, path: str) -> None:
    status, text = asked(guarded, "GET", path, None)
    assert status == 200, text
    assert guarded.admin_key not in text


def test_a_model_configuration_shows_no_secret_and_no_path(guarded: Guarded) -> None:
    _, text = asked(guarded, "GET", f"/v2/models/{MODEL}/config", None)
    secrets = [path.read_text().strip() for path in (guarded.triton.home.root / "secrets").iterdir()]
    assert not [secret for secret in [*secrets, str(guarded.triton.home.root)] if secret in text]


def test_the_key_is_in_no_log_and_on_no_page(guarded: Guarded) -> None:
    log = (guarded.triton.home.root / "triton.log").read_text()
    assert "server_id" in log, "Triton lists its options there"
    assert guarded.admin_key not in log
    assert guarded.admin_key not in guarded.triton.http.metrics()
    assert guarded.admin_key not in "\n".join(guarded.triton.command.lines)


Capture = pytest.CaptureFixture[str]


def at(guarded: Guarded) -> list[str]:
    """The arguments that lead a verb to this server."""
    return ["--url", guarded.triton.http_url, "--metrics-port", str(guarded.triton.address.metrics_port)]


def probe(guarded: Guarded, model: str, home: Path) -> int:
    port = str(guarded.triton.address.http_port)
    return main(["probe", "--model", model, "--home", str(home), "--http-port", port, "--limit", "10"])


def test_a_probe_is_let_in_by_the_secrets_of_the_node(
    guarded: Guarded, tmp_path: Path, capsys: Capture
) -> None:
    for model in (MODEL, FACADE):
        assert probe(guarded, model, guarded.triton.home.root) == 0
        assert probe(guarded, model, tmp_path) == 1
        assert "access is controlled there" in capsys.readouterr().err
    write_node_config(tmp_path / "tensorcache.toml", keys=(guarded.triton.home.public_key,))
    assert probe(guarded, MODEL, tmp_path) == 1
    assert "these secrets do not admit a probe" in capsys.readouterr().err


def test_what_lets_a_probe_in_is_good_for_nothing_else(guarded: Guarded) -> None:
    credential = probe_key(guarded.triton.home.root / "tensorcache.toml").credential
    assert guarded.generate(credential, triton_probe=True)[0] == 200
    larger: list[dict[str, object]] = [
        {}, {"triton_probe": True, "max_tokens": 2},
        {"triton_probe": True, "text_input": "A prompt of more than a few tokens is a question"},
    ]  # fmt: skip
    for more in larger:
        status, text = guarded.generate(credential, **more)
        assert (status, "access denied" in text) == (400, True), (more, text)


def test_verbs_that_ask_the_server_what_it_serves_are_answered(guarded: Guarded, capsys: Capture) -> None:
    home = ["--home", str(guarded.triton.home.root), *at(guarded)]
    short = guarded.digest[:16]
    assert main(["releases", MODEL, *home]) == 0
    assert f"serves now   release {RELEASE} ({short})" in capsys.readouterr().out
    assert main(["verify", "--running", MODEL, *home]) == 0
    assert f"digest       {guarded.digest}" in capsys.readouterr().out
    assert main(["deploy", MODEL, str(guarded.release), *home, "--wait", "30"]) == 0
    assert f"serves now   {short}" in capsys.readouterr().out


def test_headers_that_look_like_the_credential_are_not_handed_on(guarded: Guarded) -> None:
    key = f"Bearer {guarded.keys.credentials['reader-1']}"
    for name in ("proxy-authorization", "x-authorization", "authorization-info"):
        assert guarded.infer(Authorization=key, **{name: "x"})[0] == 200
        assert "finish_reason" in guarded.grpc_infer({"authorization": key, name: "x"})
