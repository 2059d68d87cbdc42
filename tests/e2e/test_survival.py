"""A killed backend comes back warm; the probe tells living from dead; a demo leaves nothing behind."""

import os
import signal
from pathlib import Path

import pytest

from scripts.cli import main
from tests.e2e.asking import generate, stream
from tests.e2e.conftest import FACADE, MODEL, Command, Home, Triton, command_line, make_home
from tests.free_ports import free_ports
from tests.waiting import wait_until

PROMPT = " ".join(f"Verse {number} praises the morning." for number in range(60))


def stub_of(triton: Triton, model: str) -> int:
    return max((stub.started, stub.pid) for stub in triton.stubs() if stub.model == model)[1]


def test_probe_is_one_line_and_an_exit_code(triton: Triton, capsys: pytest.CaptureFixture[str]) -> None:
    port = str(triton.address.http_port)
    assert main(["probe", "--http-port", port]) == 0
    line = capsys.readouterr().out
    assert line.startswith(f"ok {MODEL} ")
    assert line.count("\n") == 1
    assert main(["probe", "--http-port", port, "--model", "nobody"]) == 1
    assert capsys.readouterr().out.startswith("failed nobody ")


def test_probe_of_nobody_fails_within_its_limit(capsys: pytest.CaptureFixture[str]) -> None:
    (port,) = free_ports(1)
    assert main(["probe", "--http-port", str(port)]) == 1
    assert capsys.readouterr().out.startswith(f"failed {MODEL} ")


def test_a_killed_backend_comes_back_warm(triton: Triton) -> None:
    before = stream(triton, text_input=PROMPT, max_tokens=8)
    assert before.input_tokens > 300
    pid = stub_of(triton, MODEL)
    os.kill(pid, signal.SIGKILL)
    triton.command.wait_for(f"{MODEL}: its process died", limit_s=20)
    triton.command.wait_for("Triton is serving again", limit_s=90)
    after = stream(triton, text_input=PROMPT, max_tokens=8)
    assert after.text == before.text
    assert after.cached_tokens >= before.input_tokens - 34
    assert stub_of(triton, MODEL) != pid
    assert generate(triton, model=FACADE, text_input=PROMPT, max_tokens=2)[0] == 200


def test_a_killed_server_comes_back_warm(triton: Triton) -> None:
    before = stream(triton, text_input=PROMPT, max_tokens=8)
    os.kill(triton.command.server_pid(), signal.SIGKILL)
    triton.command.wait_for("tritonserver ended with -9", limit_s=20)
    triton.command.wait_for("Triton is serving again", limit_s=90)
    after = stream(triton, text_input=PROMPT, max_tokens=8)
    assert after.text == before.text
    assert after.cached_tokens >= before.input_tokens - 34


def test_demo_holds_and_leaves_nothing_but_the_arena(
    signed_demo: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    made = make_home(tmp_path / "run", signed_demo, cluster=f"demo-{os.getpid()}", settings={"threads": 2})
    try:
        _demo(made)
    finally:
        for arena in made.arenas():
            arena.unlink()


def _demo(made: Home) -> None:
    http, grpc, metrics = (str(port) for port in free_ports(3))
    ports = ["--http-port", http, "--grpc-port", grpc, "--metrics-port", metrics]
    command = Command("demo", "--home", str(made.root), *ports)
    assert command.rest(limit_s=150) == 0, command.lines
    assert "same text, first token" in command.lines[-1]
    assert [name for name in os.listdir("/dev/shm") if f"tensorcache-{command.process.pid}-" in name] == []
    assert made.arenas()
    processes = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    assert [pid for pid in processes if str(made.root) in command_line(pid)] == []


def test_a_taken_port_is_said_before_anything_starts(home: Home, triton: Triton) -> None:
    port = str(triton.address.http_port)
    command = Command("serve", "--home", str(home.root), "--http-port", port)
    assert command.rest(limit_s=20) == 2
    hint = f"choose another, such as HTTP_PORT={int(port) + 1000}"
    assert command.lines == [f"tensorcache: port {port} on 127.0.0.1 is in use: {hint}"]
    wait_until(lambda: generate(triton, text_input="Hi", max_tokens=1)[0] == 200)
