"""A server process is watched and ended with everything it started; processes here are small shells."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from scripts.server_process import ServerProcess, children
from tests.waiting import LIMIT_S, wait_until


def start(script: str, tmp_path: Path) -> ServerProcess:
    return ServerProcess(
        ["/bin/sh", "-c", script], environment={"PATH": os.environ["PATH"]}, log=tmp_path / "log"
    )


def gone(pid: int) -> bool:
    """Ended; a zombie that nobody reaped yet has ended too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_end_and_exit_code(tmp_path: Path) -> None:
    server = start("exit 7", tmp_path)
    assert server.wait(LIMIT_S)
    assert server.exit_code() == 7


def test_waiting_has_a_limit_and_sigterm_ends_it(tmp_path: Path) -> None:
    server = start("exec sleep 60", tmp_path)
    assert not server.wait(0.05)
    assert server.exit_code() is None
    server.ask_to_stop()
    assert server.wait(LIMIT_S)
    assert server.exit_code() == -signal.SIGTERM


def test_kill_reaches_what_it_started(tmp_path: Path) -> None:
    server = start("sleep 60 & wait", tmp_path)
    wait_until(lambda: children(server.pid))
    (started,) = children(server.pid)
    server.kill()
    wait_until(lambda: gone(started))
    server.kill()  # again: nothing happens


def test_kill_reaches_what_outlived_the_server(tmp_path: Path) -> None:
    server = start("sleep 60 & echo $!; exec sleep 60", tmp_path)
    wait_until((tmp_path / "log").read_text)
    orphan = int((tmp_path / "log").read_text())
    os.kill(server.pid, signal.SIGKILL)
    assert server.wait(LIMIT_S)
    assert Path(f"/proc/{orphan}").exists()
    server.kill()
    wait_until(lambda: gone(orphan))


def test_log_tail_keeps_reasons_and_drops_routine(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("E1129 from an earlier server\n")
    routine = "I1129 fine\\n| table |\\nW1129 no GPU\\nE1129 x CudaDriverHelper has not been initialized\\n"
    server = start(f"printf '{routine}terminate called\\nE1129 the reason\\n'", tmp_path)
    assert server.wait(LIMIT_S)
    assert server.log_tail() == "terminate called\nE1129 the reason"


def test_log_tail_of_a_log_without_reasons_is_its_end(tmp_path: Path) -> None:
    server = start("printf 'I1129 one\\nI1129 two\\n'", tmp_path)
    assert server.wait(LIMIT_S)
    assert server.log_tail() == "I1129 one\nI1129 two"


def test_it_ends_when_its_supervisor_dies(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from scripts.server_process import ServerProcess\n"
        f"s = ServerProcess(['/bin/sleep', '60'], environment={{}}, log=Path({str(tmp_path / 'log')!r}))\n"
        "print(s.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == -signal.SIGKILL
    wait_until(lambda: gone(int(done.stdout)))
