"""A server process is watched and ended with everything it started; processes here are small shells."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from scripts.server_process import ServerProcess, children


def start(script: str, tmp_path: Path) -> ServerProcess:
    return ServerProcess(
        ["/bin/sh", "-c", script], environment={"PATH": os.environ["PATH"]}, log=tmp_path / "log"
    )


def gone(pid: int, *, limit_s: float = 5.0) -> bool:
    """Ended; a zombie that nobody reaped yet has ended too."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.01)
    return False


def test_end_and_exit_code(tmp_path: Path) -> None:
    server = start("exit 7", tmp_path)
    assert server.wait(5)
    assert server.exit_code() == 7


def test_waiting_has_a_limit_and_sigterm_ends_it(tmp_path: Path) -> None:
    server = start("exec sleep 60", tmp_path)
    assert not server.wait(0.05)
    assert server.exit_code() is None
    server.ask_to_stop()
    assert server.wait(5)
    assert server.exit_code() == -signal.SIGTERM


def test_kill_reaches_what_it_started(tmp_path: Path) -> None:
    server = start("sleep 60 & wait", tmp_path)
    deadline = time.monotonic() + 5
    while not (started := children(server.pid)):
        assert time.monotonic() < deadline
    server.kill()
    assert gone(started[0])
    server.kill()  # again: nothing happens


def test_kill_reaches_what_outlived_the_server(tmp_path: Path) -> None:
    server = start("sleep 60 & echo $!; exec sleep 60", tmp_path)
    deadline = time.monotonic() + 5
    while not (orphan := (tmp_path / "log").read_text().strip()):
        assert time.monotonic() < deadline
    os.kill(server.pid, signal.SIGKILL)
    assert server.wait(5)
    assert Path(f"/proc/{orphan}").exists()
    server.kill()
    assert gone(int(orphan))


def test_log_tail_keeps_reasons_and_drops_routine(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("E1129 from an earlier server\n")
    routine = "I1129 fine\\n| table |\\nW1129 no GPU\\nE1129 x CudaDriverHelper has not been initialized\\n"
    server = start(f"printf '{routine}terminate called\\nE1129 the reason\\n'", tmp_path)
    assert server.wait(5)
    assert server.log_tail() == "terminate called\nE1129 the reason"


def test_log_tail_of_a_log_without_reasons_is_its_end(tmp_path: Path) -> None:
    server = start("printf 'I1129 one\\nI1129 two\\n'", tmp_path)
    assert server.wait(5)
    assert server.log_tail() == "I1129 one\nI1129 two"


def test_it_ends_when_its_supervisor_dies(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from scripts.server_process import ServerProcess\n"
        f"s = ServerProcess(['/bin/sleep', '60'], environment={{}}, log=Path({str(tmp_path / 'log')!r}))\n"
        "print(s.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == -signal.SIGKILL
    assert gone(int(done.stdout))
