"""A second Triton, with access control, a verbose log and a trace of every tensor: for what must stay out."""

import datetime
import json
import os
import queue
import shutil
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tritonclient.grpc

from backend.access import new_key
from engines import current_digest, generate_signing_key, sign_release
from engines.manifest import EngineManifest, encode_manifest, parse_manifest
from scripts.triton_http import TritonHttp
from scripts.triton_runtime import TritonAddress
from scripts.triton_stream import tensor
from tests.e2e.conftest import FACADE, MODEL, Command, Triton, make_home
from tests.free_ports import free_ports

RELEASE = 5
"""What is served; it is also the least that may be."""

_NODE = f"""
[trust.min_release]
{MODEL} = {RELEASE}
[log]
level = "debug"
"""
_PROMPT = {"text_input": "Hi", "max_tokens": 1}


@dataclass
class Keys:
    """The acl file, and the credentials it knows: credential by key id."""

    file: Path
    credentials: dict[str, str] = field(default_factory=dict)

    def write(self, principals: Mapping[str, tuple[list[str], Mapping[str, str]]]) -> None:
        """Principals with their models, and for each key id what else the file says of it."""
        lines = []
        for name, (models, keys) in principals.items():
            lines += [f"[principals.{name}]", f"models = {json.dumps(models)}"]
            for key_id, more in keys.items():
                credential, entry = new_key(key_id)
                self.credentials[key_id] = credential
                lines += [
                    f"[[principals.{name}.keys]]",
                    f'id = "{key_id}"',
                    f'sha256 = "{entry.sha256}"',
                    more,
                ]
        self.file.write_text("\n".join(lines) + "\n")
        self.file.chmod(0o600)


@dataclass(frozen=True)
class Guarded:
    """The server, its admin key, who it knows, and where its trace goes."""

    triton: Triton
    admin_key: str
    keys: Keys
    trace: Path
    release: Path
    """The signed folder of the release that is served."""

    @property
    def digest(self) -> str:
        return current_digest(self.triton.home.repository / MODEL / "1")

    def post(self, path: str, body: object, headers: Mapping[str, str] | None = None) -> tuple[int, str]:
        """Status and text of one HTTP request, without the admin key."""
        connection = HTTPConnection("127.0.0.1", self.triton.address.http_port, timeout=30)
        try:
            connection.request("POST", path, body=json.dumps(body), headers=dict(headers or {}))
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def generate(self, credential: str | None, *, model: str = MODEL, **more: object) -> tuple[int, str]:
        """POST /generate with an api_key, if there is one."""
        shown = {} if credential is None else {"api_key": credential}
        return self.post(f"/v2/models/{model}/generate", {**_PROMPT, **shown, **more})

    def infer(self, *, body: Mapping[str, object] | None = None, **headers: str) -> tuple[int, str]:
        """POST /infer of the facade."""
        inputs = [
            {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["Hi"]},
            {"name": "max_tokens", "shape": [1], "datatype": "INT32", "data": [1]},
        ]
        return self.post(f"/v2/models/{FACADE}/infer", {"inputs": inputs, **(body or {})}, headers)

    def grpc_infer(self, headers: Mapping[str, str] | None = None, **parameters: object) -> str:
        """The whole answer of a gRPC infer through the facade, or its error."""
        with tritonclient.grpc.InferenceServerClient(self.triton.grpc_url) as client:
            try:
                answer = client.infer(
                    FACADE, _tensors(), headers=headers, parameters=parameters, client_timeout=30
                )
            except tritonclient.grpc.InferenceServerException as error:
                return str(error)
            return str(answer.get_response())

    def grpc_stream(self, headers: Mapping[str, str] | None = None, **parameters: object) -> str:
        """The whole first answer of a gRPC stream, or its error."""
        answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
        with tritonclient.grpc.InferenceServerClient(self.triton.grpc_url) as client:
            client.start_stream(
                lambda result, error: answers.put((result, error)), headers=dict(headers or {})
            )
            client.async_stream_infer(
                MODEL, _tensors(), enable_empty_final_response=True, parameters=parameters or None
            )
            result, error = answers.get(timeout=30)
            client.stop_stream()
        return str(error) if error is not None else str(result.get_response())

    def serves(self) -> bool:
        """True if the release in the repository answers who may ask."""
        status, text = self.generate(self.keys.credentials["reader-1"])
        return status == 200 and json.loads(text)["release"] == self.digest[:16]


def _tensors() -> list[tritonclient.grpc.InferInput]:
    return [tensor(name, value) for name, value in _PROMPT.items()]


def signed_copy(source: Path, folder: Path, *, private: Path | None, **changes: object) -> Path:
    """A release with another engine.json, signed again if there is a key."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("model.sig"))
    manifest = parse_manifest((source / "engine.json").read_bytes())
    changed: EngineManifest = msgspec.structs.replace(manifest, **changes)
    (folder / "engine.json").write_bytes(encode_manifest(changed))
    if private is not None:
        sign_release(folder, private)
    return folder


def _principals() -> dict[str, tuple[list[str], dict[str, str]]]:
    past = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC).isoformat()
    readers = {f"reader-{number}": "" for number in range(1, 13)}
    return {
        "reader": ([MODEL], {**readers, "reader-old": f"expires = {past}"}),
        "stranger": (["another-model", "door*"], {"stranger-1": "", "stranger-2": ""}),
    }


@pytest.fixture(scope="session")
def guarded(small_release: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """Shared by all tests of doors and of secrets in logs; it must stop in order."""
    folder = tmp_path_factory.mktemp("guarded")
    private, public = generate_signing_key(folder / "keys")
    release = signed_copy(small_release, folder / "release", private=private, model=MODEL, release=RELEASE)
    home = make_home(
        folder / "run", (release, private, public), cluster=f"guarded-{os.getpid()}", settings={"lanes": 4}
    )
    config = home.root / "tensorcache.toml"
    text = config.read_text().replace("[trust]\n", "[trust]\nrecheck_s = 0.5\n", 1)
    config.write_text(text + _NODE)
    keys = Keys(home.root / "acl.toml")
    keys.write(_principals())
    trace = folder / "trace"
    trace.mkdir()
    http, grpc, metrics = free_ports(3)
    flags = [
        "--log-verbose=2", "--trace-config=rate=1", "--trace-config=level=TENSORS",
        "--trace-config=level=TIMESTAMPS", f"--trace-config=triton,file={trace / 'trace.json'}",
        "--trace-config=triton,log-frequency=1",
    ]  # fmt: skip
    command = Command(
        "serve", "--home", str(home.root), "--http-port", str(http), "--grpc-port", str(grpc),
        "--metrics-port", str(metrics), "--pause-limit", "1", *(f"--triton-flag={flag}" for flag in flags),
    )  # fmt: skip
    try:
        command.wait_for(f"serving {MODEL}", limit_s=120)
        address = TritonAddress(http_port=http, grpc_port=grpc, metrics_port=metrics)
        admin_key = (home.root / "admin.key").read_text().strip()
        triton = Triton(home, address, TritonHttp(address, admin_key=admin_key), command)
        yield Guarded(triton, admin_key, keys, trace, release)
        command.process.send_signal(signal.SIGTERM)
        assert command.rest(limit_s=40) == 0
    finally:
        command.end()
        for arena in home.arenas():
            arena.unlink()
        if os.environ.get("KEEP_TRITON_LOG"):
            print((home.root / "triton.log").read_text())
