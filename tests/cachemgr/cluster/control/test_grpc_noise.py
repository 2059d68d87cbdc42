"""Who knocks at the control service without a certificate writes nothing into the server's log."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
KNOCK = """
import socket, grpc
from concurrent.futures import ThreadPoolExecutor
from tests.cachemgr.cluster.certificates import Authority
paths = Authority(__import__("pathlib").Path("ca")).issue("a")
key, cert = open(paths.tls_key, "rb").read(), open(paths.tls_cert, "rb").read()
server = grpc.server(ThreadPoolExecutor(1))
port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, cert)]))
server.start()
with socket.create_connection(("127.0.0.1", port), 10) as stranger:
    stranger.sendall(b"GET / HTTP/1.1\\r\\n\\r\\n")
    while stranger.recv(100):
        pass
server.stop(None).wait()
"""


@pytest.mark.parametrize(
    "start",
    [
        "from backend.environment import keep_grpc_quiet; keep_grpc_quiet()",
        "from scripts import cli; cli.main(['keygen', 'keys'])",
    ],
)
def test_a_handshake_that_fails_is_no_line_in_the_log(tmp_path: Path, start: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "GRPC_VERBOSITY"}
    done = subprocess.run(
        [sys.executable, "-c", f"{start}\n{KNOCK}"],
        env=environment | {"PYTHONPATH": str(ROOT)},
        cwd=tmp_path, check=True, timeout=60, capture_output=True, text=True,
    )  # fmt: skip
    assert "andshake" not in done.stderr
