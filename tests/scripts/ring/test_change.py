"""Changes of the ring by the command: each wins everywhere, or fails with what it lost to."""

import asyncio
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from cachemgr.cluster.control.trouble import ControlTrouble, Trouble
from cachemgr.ring import RingState, Version, set_replicas
from scripts.cli import main
from tests.free_ports import free_ports
from tests.scripts.ring.conftest import Ask
from tests.scripts.ring.ring_cluster import RingCluster


def test_every_change_is_in_force_everywhere_when_the_command_ends(cluster: RingCluster, ask: Ask) -> None:
    [free] = free_ports(1)
    for epoch, words in enumerate(
        [
            ("move", "node-a#5", "node-b"),
            ("replicas", "2"),
            ("drain", "node-c"),
            ("add", "node-d", "--address", f"127.0.0.1:{free}", "--domain", "x", "--weight", "0.5"),
            ("remove", "node-d"),
        ],
        start=2,
    ):
        said = ask(*words, *cluster.via(epoch % 2))
        assert (said.code, said.err) == (0, "")
        [version] = cluster.versions()
        assert version.epoch == epoch
        assert said.lines[0].startswith(f"ring {epoch} ({version.digest.hex()[:8]}) replaces {epoch - 1} (")
    state = cluster.nodes[0].rings.ring.state
    assert (state.overrides, state.replicas) == ({"node-a#5": "node-b"}, 2)
    assert [node.draining for node in state.nodes] == [False, False, True]


def test_who_comes_second_is_told_what_it_lost_to(
    cluster: RingCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = cluster.nodes[0]
    slow.delay = asyncio.Event()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(main, ["ring", "replicas", "2", *cluster.via(0)])
        assert slow.asked.wait(30)  # the ring that it is about to replace is read
        assert main(["ring", "replicas", "0", *cluster.via(1)]) == 0
        [won] = cluster.versions()
        cluster.loop.call_soon_threadsafe(slow.delay.set)
        assert first.result(30) == 1
    err = capsys.readouterr().err
    assert err.startswith("tensorcache: this change of ring 1 (")
    assert f" lost to ring 2 ({won.digest.hex()[:8]}): see what it is now with `tensorcache ring show`" in err
    assert err.count("\n") == 1
    assert cluster.versions() == {won}


def test_a_change_of_a_ring_that_was_seen_before_fails_once_another_is_in_force(
    cluster: RingCluster, ask: Ask
) -> None:
    assert ask("replicas", "2", "--replaces", "1", *cluster.at).code == 0
    late = ask("replicas", "3", "--replaces", "1", *cluster.at)
    assert late.code == 1
    assert late.err.startswith("tensorcache: nothing changed: the ring is 2 (")
    assert cluster.nodes[0].rings.ring.state.replicas == 2


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("drain", "node-x"), "node: must be in the ring, got 'node-x': `tensorcache ring show` lists"),
        (("remove", "node-x"), "node: must be in the ring"),
        (("move", "node-a#999", "node-b"), "vnode: must be one of the 128 of node-a"),
        (("move", "node-a", "node-b"), "vnode: must be NODE#NUMBER"),
        (("move", "node-a#1", "node-a"), "node: must not be the one that has node-a#1 now"),
        (("replicas", "7"), "replicas: must be 0 to 3, got 7"),
        (("replicas", "1"), "replicas: must differ from what it is"),
        (("add", "node-a", "--address", "127.0.0.1:1"), "node: must not be in the ring already"),
        (("add", "Node", "--address", "127.0.0.1:1"), "id: must be 1 to 63 of a-z"),
        (("add", "n", "--address", "127.0.0.1"), "address: must be host:port"),
        (("add", "n", "--address", "h:1", "--weight", "0"), "weight: must be"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    still_cluster: RingCluster, ask: Ask, words: tuple[str, ...], problem: str
) -> None:
    before = still_cluster.versions()
    said = ask(*words, *still_cluster.at)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith(f"tensorcache: {problem}")
    assert said.err.count("\n") == 1
    assert still_cluster.versions() == before


def test_two_nodes_at_one_address_are_refused(cluster: RingCluster, ask: Ask) -> None:
    taken = cluster.nodes[0].spec.address
    said = ask("add", "node-d", "--address", taken, *cluster.at)
    problem = f"address: must not be that of node-a, which is on the ring, got '{taken}'"
    assert (said.code, said.err) == (2, f"tensorcache: {problem}\n")
    assert ask("drain", "node-a", *cluster.at).code == 0
    assert ask("add", "node-a", "--address", taken, *cluster.at).code == 0  # its own


def test_the_membership_s_own_trouble_is_told(cluster: RingCluster, ask: Ask) -> None:
    async def refuse(state: RingState, replaces: Version) -> Version | None:
        raise ControlTrouble(Trouble.FAILED, "Redis at 127.0.0.1:6379 is full; the ring was not changed")

    cluster.nodes[0].control._publish = refuse
    said = ask("replicas", "2", *cluster.at)
    assert said.code == 1
    assert said.err == "tensorcache: Redis at 127.0.0.1:6379 is full; the ring was not changed\n"


def test_a_node_that_is_down_does_not_hinder_a_change(cluster: RingCluster, ask: Ask) -> None:
    cluster.stop(2)
    assert ask("replicas", "2", *cluster.at).code == 0
    assert cluster.nodes[1].rings.ring.state.replicas == 2


def test_a_change_as_json(cluster: RingCluster, ask: Ask) -> None:
    before = cluster.nodes[0].rings.ring.state
    data = json.loads(ask("replicas", "2", "--json", *cluster.at).out)
    after = set_replicas(before, 2)
    assert data["digest"] == after.version.digest.hex()
    assert data["replaces"] == {"epoch": 1, "digest": before.version.digest.hex()}


def test_the_command_itself(still_cluster: RingCluster) -> None:
    command = [sys.executable, "-m", "scripts.cli", "ring", "show", *still_cluster.at]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith("ring 1 (")


@pytest.mark.parametrize("verb", ["show", "owners", "add", "remove", "move", "drain", "replicas", "explain"])
def test_help_has_examples(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["ring", verb, "--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert f"examples:\n  tensorcache ring {verb}" in text
    assert "--json" in text
