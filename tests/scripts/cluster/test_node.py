"""One server of a cluster: started, found serving, killed outright, started again, stopped in order."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.cluster.node import LOG, NodeServer
from scripts.cluster.plan import NodePlan
from scripts.cluster.running import bring_up, look_after, stop_all
from scripts.errors import TritonError
from scripts.interruption import Interruption
from scripts.triton_runtime import TritonAddress
from tests.waiting import wait_until

STANDIN = Path(__file__).parent / "standin_serve.py"
Make = Callable[[str], NodeServer]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[NodeServer] = []

    def make_one(what: str) -> NodeServer:
        name = f"node-{len(made) + 1}"
        plan = NodePlan(name, tmp_path / name, TritonAddress(), 8005)
        made.append(NodeServer(plan, serve=(sys.executable, str(STANDIN), what)))
        return made[-1]

    yield make_one
    for server in made:
        server.kill()


def regions(pids: list[int]) -> list[str]:
    return [name for name in os.listdir("/dev/shm") if any(f"tensorcache-{pid}-" in name for pid in pids)]


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_all_of_a_killed_server_is_gone_and_it_comes_back(make: Make) -> None:
    server = make("serve")
    bring_up([server], interruption=Interruption())
    first = server.processes()
    assert len(first) == 2
    assert len(regions(first)) == 1
    server.kill()
    assert (alive(first[:1]), regions(first), server.processes()) == ([], [], [])
    assert "ended with -9" in server.ended
    server.kill()  # once more is nothing
    bring_up([server], interruption=Interruption())
    again = server.processes()
    assert len(again) == 2
    assert not set(again) & set(first)


def test_stopped_in_order_it_leaves_nothing(make: Make) -> None:
    servers = [make("serve"), make("serve"), make("serve")]
    bring_up(servers, interruption=Interruption())
    pids = [pid for server in servers for pid in server.processes()]
    stop_all(servers)
    assert [server.ended.split(":")[0] for server in servers] == ["ended with 0"] * 3
    assert (alive(pids), regions(pids)) == ([], [])
    stop_all(servers)


def test_deaf_to_sigterm_it_is_killed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.cluster.node._STOP_LIMIT_S", 0.3)
    server = make("ignore")
    bring_up([server], interruption=Interruption())
    pids = server.processes()
    stop_all([server])
    assert (server.processes(), regions(pids)) == ([], [])


def test_one_that_refuses_is_an_error_with_its_last_words(make: Make) -> None:
    with pytest.raises(TritonError) as refused:
        bring_up([make("serve"), make("refuse")], interruption=Interruption())
    assert str(refused.value).startswith("node-2 ended with 2: tensorcache: port 8000 on 127.0.0.1 is in use")
    assert LOG in str(refused.value)


def test_the_others_go_on_when_one_gave_up(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    looks: list[int] = []
    servers = [make("serve"), make("serve")]

    def sleep(seconds: float) -> None:
        looks.append(len(looks))
        if len(looks) == 3:
            servers[0].kill()
        if len(looks) == 10:
            raise KeyboardInterrupt

    bring_up(servers, interruption=Interruption())
    with pytest.raises(KeyboardInterrupt):
        look_after(servers, interruption=Interruption(sleep=sleep))
    assert capsys.readouterr().err.count("node-1 ended with -9") == 1
    servers[1].kill()
    with pytest.raises(TritonError, match="no server of the cluster is left"):
        look_after(servers, interruption=Interruption())


def test_whose_parent_dies_stops_by_itself(tmp_path: Path) -> None:
    """A cluster whose command is killed takes its servers with it."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom scripts.cluster.node import NodeServer\n"
        "from scripts.cluster.plan import NodePlan\nfrom scripts.triton_runtime import TritonAddress\n"
        f"plan = NodePlan('node-1', Path({str(tmp_path)!r}), TritonAddress(), 8005)\n"
        f"server = NodeServer(plan, serve=({sys.executable!r}, {str(STANDIN)!r}, 'serve'))\n"
        "server.start()\n"
        "while not server.serving(): pass\n"
        "import os, signal\nprint(*server.processes(), flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    wait_until(lambda: not regions(pids))
