"""An engine call that never returns, and a process that is frozen: clients are told, and the server recovers.

The step loop's thread of a serving process is really stopped. While its supervisor is paused, only what the
backend itself does can be seen.
"""

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import HTTPException

import pytest

from scripts.cli import main
from scripts.errors import TritonError
from tests.e2e.asking import events, generate, stream, text_of
from tests.e2e.conftest import FACADE, MODEL, Triton
from tests.e2e.stopped_thread import stopped_python, stopped_thread
from tests.waiting import wait_until

ENDLESS: dict[str, object] = {"text_input": "Once upon a time", "max_tokens": 1900, "ignore_eos": True}
STUCK = "the backend is stuck: step-loop hangs (limit 4 s)"
STALL_LIMIT_S = 5.0
SLACK_S = 3.0
"""For a machine that is busy with other things."""


def decoder_pid(triton: Triton) -> int:
    return max((stub.started, stub.pid) for stub in triton.stubs() if stub.model == MODEL)[1]


@contextlib.contextmanager
def unsupervised(triton: Triton) -> Iterator[None]:
    """The supervisor is paused inside."""
    triton.command.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        triton.command.process.send_signal(signal.SIGCONT)


def grpc_end(triton: Triton) -> str:
    try:
        return f"ended: {stream(triton, **ENDLESS).finish_reason}"
    except TritonError as error:
        return str(error)


def http_end(triton: Triton) -> str:
    try:
        return str([*events(triton, stream=True, **ENDLESS)][-1])
    except (OSError, HTTPException) as error:
        return f"closed: {error!r}"


def facade_end(triton: Triton) -> str:
    try:
        return json.dumps(generate(triton, model=FACADE, **ENDLESS)[1])
    except (OSError, HTTPException) as error:
        return f"closed: {error!r}"


@contextlib.contextmanager
def open_answers(triton: Triton) -> Iterator[list[Future[str]]]:
    """Three clients in the middle of an endless answer: gRPC stream, HTTP stream, facade."""
    wait_until(lambda: triton.metric("requests_running", model=MODEL) == 0)
    with ThreadPoolExecutor(3) as pool:
        clients = [pool.submit(client, triton) for client in (grpc_end, http_end, facade_end)]
        wait_until(lambda: running(triton, clients) == 3)
        yield clients


def running(triton: Triton, clients: list[Future[str]]) -> float:
    """Answers under way; none of the clients' may have ended yet."""
    ended = [client.result() for client in clients if client.done()]
    assert not ended, f"before anything happened to the server: {ended}"
    return triton.metric("requests_running", model=MODEL)


def ends(clients: list[Future[str]], *, limit_s: float) -> list[str]:
    return [client.result(timeout=limit_s) for client in clients]


@pytest.mark.timeout(120)
def test_a_loop_that_hangs_is_said_by_the_backend_itself_and_serves_again_when_it_comes_back(
    triton: Triton, capsys: pytest.CaptureFixture[str]
) -> None:
    pid = decoder_pid(triton)
    stalls = triton.metric("step_loop_stalls_total", model=MODEL)
    with unsupervised(triton), open_answers(triton) as clients:
        with stopped_thread(pid, "step-loop", moving="watchdog"):
            for end in ends(clients, limit_s=STALL_LIMIT_S + SLACK_S):
                assert STUCK in end
            assert main(["probe", "--http-port", str(triton.address.http_port)]) == 1
            assert capsys.readouterr().out.startswith(f"failed {MODEL} ")
            assert STUCK in generate(triton, model=FACADE, text_input="Hi", max_tokens=1)[1]["error"]
            wait_until(lambda: triton.metric("step_loop_stuck", model=MODEL) == 1)
        wait_until(lambda: triton.metric("step_loop_stuck", model=MODEL) == 0)
        wait_until(lambda: triton.metric("requests_running", model=MODEL) == 0)
        assert text_of(triton, text_input="Hi", max_tokens=2)
        assert decoder_pid(triton) == pid
    assert triton.metric("step_loop_stalls_total", model=MODEL) == stalls + 1
    log = (triton.home.root / "triton.log").read_text()
    assert "step-loop hangs (limit 4 s), at " in log
    assert "step-loop moves again" in log


@pytest.mark.timeout(120)
def test_a_model_whose_loop_hangs_can_be_unloaded(triton: Triton) -> None:
    pid = decoder_pid(triton)
    with unsupervised(triton):
        with stopped_thread(pid, "step-loop", moving="watchdog"):
            triton.http.unload(MODEL)
            wait_until(lambda: pid not in [stub.pid for stub in triton.stubs()], limit_s=30)
        wait_until(lambda: triton.http.repository_index()[MODEL][0] == "UNAVAILABLE")
        triton.http.load(MODEL)
    assert text_of(triton, text_input="Hi", max_tokens=2)


@pytest.mark.timeout(120)
def test_a_loop_that_hangs_is_replaced_by_the_supervisor(triton: Triton) -> None:
    pid = decoder_pid(triton)
    with open_answers(triton) as clients, stopped_thread(pid, "step-loop", moving="watchdog"):
        for end in ends(clients, limit_s=STALL_LIMIT_S + SLACK_S):
            assert STUCK in end
        triton.command.wait_for(STUCK, limit_s=20)
        triton.command.wait_for("Triton is serving again", limit_s=60)
    assert decoder_pid(triton) != pid
    assert text_of(triton, text_input="Hi", max_tokens=2)


@pytest.mark.timeout(120)
def test_clients_of_an_engine_call_that_keeps_pythons_own_lock_are_hung_up_on(triton: Triton) -> None:
    pid = decoder_pid(triton)
    with open_answers(triton) as clients, stopped_python(pid, "step-loop", "replies", "watchdog"):
        triton.command.wait_for("no token within 2 s; hung up on its clients", limit_s=60)
        for end in ends(clients, limit_s=5):
            assert "finish_reason" not in end
            assert "ended:" not in end
        triton.command.wait_for("Triton is serving again", limit_s=60)
    assert text_of(triton, text_input="Hi", max_tokens=2)


@pytest.mark.timeout(120)
def test_clients_of_a_frozen_process_are_hung_up_on(triton: Triton) -> None:
    pid = decoder_pid(triton)
    with open_answers(triton) as clients:
        os.kill(pid, signal.SIGSTOP)
        triton.command.wait_for("hung up on its clients", limit_s=40)
        for end in ends(clients, limit_s=5):
            assert "finish_reason" not in end
            assert "ended:" not in end
        triton.command.wait_for("Triton is serving again", limit_s=60)
    assert text_of(triton, text_input="Hi", max_tokens=2)


@pytest.mark.timeout(120)
def test_a_server_that_gave_up_a_process_that_stood_still_is_started_again(triton: Triton) -> None:
    """Triton frees memory that the process then reads, and aborts: it cannot be told to wait longer."""
    question: dict[str, object] = {"text_input": "The sea is calm tonight", "max_tokens": 8}
    before, pid = stream(triton, **question), decoder_pid(triton)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(TritonError, match="is not healthy"):
            stream(triton, **question)
    finally:
        os.kill(pid, signal.SIGCONT)
    triton.command.wait_for("; starting Triton again in", limit_s=20)
    triton.command.wait_for("Triton is serving again", limit_s=60)
    assert decoder_pid(triton) != pid
    assert stream(triton, **question).text == before.text
