"""The ring in force: only ever higher, kept over restarts, the ones before it asked for as long as needed."""

import logging
from pathlib import Path

import pytest

from cachemgr.cluster.rings import MAX_EARLIER, NO_RING, SETTLED_S, RingsInForce
from cachemgr.ring import (
    NodeId,
    NodeSpec,
    Ring,
    RingConflict,
    RingError,
    RingFile,
    RingState,
    add_node,
    decode_ring,
    drain_node,
    first_state,
    remove_node,
    set_replicas,
)
from tests.cachemgr.cluster.control.clock import TurnedClock

PREVIOUS_S = 600.0


def spec(name: str, port: int = 7000) -> NodeSpec:
    return NodeSpec(name, f"127.0.0.1:{port}")


FIRST = first_state([spec("a", 7001), spec("b", 7002)], replicas=1)
SECOND = add_node(FIRST, spec("c", 7003))
THIRD = set_replicas(SECOND, 2)


@pytest.fixture
def now() -> TurnedClock:
    return TurnedClock(1_700_000_000.0)


class Opener:
    """Opens the rings of node a, again and again, over one file."""

    def __init__(self, path: Path, now: TurnedClock) -> None:
        self.path = path
        self.now = now

    def __call__(self, given: RingState | None = None) -> RingsInForce:
        return RingsInForce(
            NodeId("a"), file=RingFile(self.path), previous_s=PREVIOUS_S, given=given, now=self.now
        )


@pytest.fixture
def rings_of_a(tmp_path: Path, now: TurnedClock) -> Opener:
    return Opener(tmp_path / "cluster" / "ring.json", now)


def epochs(rings: RingsInForce) -> list[int]:
    return [ring.state.epoch for ring in rings.earlier]


def test_there_is_no_ring_before_the_first(rings_of_a: Opener) -> None:
    rings = rings_of_a()
    assert not rings.known
    assert rings.version == NO_RING
    assert rings.previous is None
    with pytest.raises(RuntimeError, match="no ring is installed"):
        _ = rings.ring
    assert rings.install(FIRST)
    assert rings.known
    assert rings.version > NO_RING


def test_only_higher_versions_are_installed(rings_of_a: Opener) -> None:
    rings = rings_of_a(SECOND)
    assert not rings.install(FIRST)
    assert not rings.install(SECOND)
    other = add_node(FIRST, spec("d", 7004))
    low, high = sorted((SECOND, other), key=lambda state: state.version)
    rings.install(high)
    assert rings.ring.state == high
    assert not rings.install(low)
    assert rings.ring.state == high


def test_what_listeners_hear_of_is_on_disk(rings_of_a: Opener) -> None:
    rings = rings_of_a(FIRST)
    heard: list[tuple[int, int | None, int]] = []

    def listener(ring: Ring, previous: Ring | None) -> None:
        kept = RingFile(rings_of_a.path).load()
        assert kept is not None
        heard.append((ring.state.epoch, previous and previous.state.epoch, kept.current.epoch))

    rings.listen(listener)
    rings.install(SECOND)
    rings.install(FIRST)
    assert heard == [(2, 1, 2)]


def test_a_listener_that_fails_keeps_the_ring_from_nobody(
    rings_of_a: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    rings = rings_of_a(FIRST)
    heard: list[int] = []
    rings.listen(lambda ring, previous: 1 // 0)
    rings.listen(lambda ring, previous: heard.append(ring.state.epoch))
    assert rings.install(SECOND)
    assert heard == [2]
    assert "a listener failed" in caplog.text


@pytest.mark.parametrize(("given", "in_force"), [(None, 2), (FIRST, 2), (SECOND, 2), (THIRD, 3)])
def test_a_node_starts_with_the_highest_it_can_have(
    rings_of_a: Opener, given: RingState | None, in_force: int
) -> None:
    rings_of_a(SECOND)
    assert rings_of_a(given).ring.state.epoch == in_force


def test_previous_lasts_for_its_time_once_all_is_pulled(rings_of_a: Opener, now: TurnedClock) -> None:
    rings = rings_of_a(FIRST)
    now.turn(100)
    rings.install(SECOND)
    rings.mark_pulled(SECOND.version)
    now.turn(PREVIOUS_S - 1)
    assert epochs(rings) == [1]
    now.turn(1)
    assert rings.previous is None


def test_previous_lasts_while_something_is_not_pulled(rings_of_a: Opener, now: TurnedClock) -> None:
    rings = rings_of_a(FIRST)
    now.turn(100)
    rings.install(SECOND)
    now.turn(10 * PREVIOUS_S)
    assert epochs(rings) == [1]
    rings.mark_pulled(FIRST.version)  # news of a pull that was overtaken
    assert not rings.pulled
    rings.mark_pulled(SECOND.version)
    assert rings.pulled
    assert rings.previous is None


def test_over_a_restart_nothing_of_that_is_forgotten(rings_of_a: Opener, now: TurnedClock) -> None:
    rings = rings_of_a(FIRST)
    now.turn(100)
    rings.install(SECOND)
    now.turn(10 * PREVIOUS_S)
    again = rings_of_a()
    assert (again.ring.state.epoch, epochs(again), again.pulled) == (2, [1], False)
    again.mark_pulled(SECOND.version)
    once_more = rings_of_a(FIRST)
    assert (once_more.ring.state.epoch, epochs(once_more), once_more.pulled) == (2, [], True)


def test_a_clock_that_was_set_back_does_not_keep_previous(rings_of_a: Opener, now: TurnedClock) -> None:
    rings = rings_of_a(FIRST)
    now.turn(100)
    rings.install(SECOND)
    rings.mark_pulled(SECOND.version)
    now.turn(-1_000_000)
    again = rings_of_a()
    now.turn(PREVIOUS_S)
    assert again.previous is None


def test_changes_in_quick_succession_leave_several(rings_of_a: Opener, now: TurnedClock) -> None:
    rings = rings_of_a(FIRST)
    state = FIRST
    for replicas in (2, 3, 0, 1, 2, 3):
        now.turn(SETTLED_S)
        state = set_replicas(state, replicas)
        rings.install(state)
    assert epochs(rings) == [6, 5, 4, 3]
    assert len(epochs(rings)) == MAX_EARLIER


def test_a_ring_that_lost_a_race_is_nobody_s_previous(rings_of_a: Opener, now: TurnedClock) -> None:
    rings = rings_of_a(FIRST)
    now.turn(100)
    low, high = sorted((SECOND, add_node(FIRST, spec("d", 7004))), key=lambda state: state.version)
    rings.install(low)
    now.turn(SETTLED_S / 2)
    rings.install(high)
    assert [ring.state for ring in rings.earlier] == [FIRST]


def test_a_change_has_to_name_the_ring_in_force(rings_of_a: Opener) -> None:
    rings = rings_of_a(FIRST)
    rings.propose(SECOND, replaces=FIRST.version)
    with pytest.raises(RingConflict) as conflict:
        rings.propose(add_node(FIRST, spec("d", 7004)), replaces=FIRST.version)
    assert conflict.value.version == SECOND.version
    with pytest.raises(RingError, match="must be above that in force, 2"):
        rings.propose(FIRST, replaces=SECOND.version)
    assert rings.ring.state == SECOND


def test_a_full_disk_costs_only_what_a_restart_remembers(
    rings_of_a: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    rings = rings_of_a(FIRST)
    rings_of_a.path.parent.rename(rings_of_a.path.parent.with_name("away"))
    rings_of_a.path.parent.write_text("not a folder")
    assert rings.install(SECOND)
    assert rings.ring.state == SECOND
    assert "would not survive a restart" in rings.trouble
    assert "cannot be written" in caplog.text
    rings_of_a.path.parent.unlink()
    rings.install(THIRD)
    assert rings.trouble == ""


def test_a_disk_that_has_room_again_gets_the_ring(
    rings_of_a: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    rings = rings_of_a(FIRST)
    rings.save_again()
    folder = rings_of_a.path.parent
    folder.rename(folder.with_name("away"))
    folder.write_text("not a folder")
    rings.install(SECOND)
    for _ in range(3):
        rings.save_again()
    assert caplog.text.count("cannot be written") == 1
    folder.unlink()
    rings.save_again()
    assert rings.trouble == ""
    assert rings_of_a().ring.state == SECOND


def test_what_is_sent_is_the_ring_in_force(rings_of_a: Opener, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rings = rings_of_a()
    assert rings.encoded == b""
    for state in (FIRST, SECOND, drain_node(SECOND, "c"), remove_node(drain_node(SECOND, "c"), "c")):
        rings.install(state)
        assert decode_ring(rings.encoded) == rings.ring.state
    assert "ring 2 is in force: 3 nodes, 1 replicas" in caplog.text


def test_several_quick_changes_survive_a_restart(rings_of_a: Opener, now: TurnedClock) -> None:
    rings = rings_of_a(FIRST)
    for name in "xyz":
        now.turn(SETTLED_S)
        rings.install(add_node(rings.ring.state, spec(name)))
    assert len(epochs(rings)) == 3
    assert epochs(rings_of_a()) == epochs(rings)
