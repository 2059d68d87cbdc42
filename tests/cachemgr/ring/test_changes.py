"""Each change of a ring: what the next epoch is, and which changes are refused."""

from collections.abc import Callable

import msgspec
import pytest

from cachemgr.ring import (
    RingError,
    RingState,
    add_node,
    crowded_domain,
    drain_node,
    first_state,
    move_vnode,
    remove_node,
    set_replicas,
)
from tests.cachemgr.ring.rings import ring_of, spec

ABC = first_state([spec("a"), spec("b"), spec("c")], replicas=1)
MOVED = move_vnode(move_vnode(move_vnode(ABC, "a#1", "b"), "b#2", "c"), "c#3", "a")


def test_add() -> None:
    state = add_node(ABC, spec("aa", weight=0.5))
    assert (state.epoch, [node.id for node in state.nodes]) == (2, ["a", "aa", "b", "c"])
    assert ABC.epoch == 1
    assert state.version > ABC.version


def test_remove_takes_overrides_with_it() -> None:
    assert MOVED.overrides == {"a#1": "b", "b#2": "c", "c#3": "a"}
    state = remove_node(MOVED, "b")
    assert (state.epoch, [node.id for node in state.nodes]) == (MOVED.epoch + 1, ["a", "c"])
    assert state.overrides == {"c#3": "a"}


def test_drain_keeps_the_node_and_takes_its_vnodes() -> None:
    state = drain_node(MOVED, "b")
    assert (state.epoch, state.overrides) == (MOVED.epoch + 1, {"c#3": "a"})
    assert state.nodes[1] == spec("b", draining=True)
    back = add_node(state, spec("b", weight=2.0))
    assert back.nodes[1] == spec("b", weight=2.0)


def test_move_and_back_home() -> None:
    there = move_vnode(ABC, "a#1", "b")
    further = move_vnode(there, "a#1", "c")
    back = move_vnode(further, "a#1", "a")
    assert [state.overrides for state in (there, further, back)] == [{"a#1": "b"}, {"a#1": "c"}, {}]
    assert [state.epoch for state in (there, further, back)] == [2, 3, 4]


def test_set_replicas() -> None:
    state = set_replicas(ABC, 3)
    assert (state.epoch, state.replicas, state.nodes) == (2, 3, ABC.nodes)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda: add_node(ABC, spec("a")), "node: must not be in the ring already, got 'a'"),
        (lambda: remove_node(ABC, "d"), "node: must be in the ring, got 'd'"),
        (lambda: remove_node(first_state([spec("a")], replicas=1), "a"), "nodes: must be at least one"),
        (lambda: remove_node(drain_node(remove_node(ABC, "c"), "a"), "b"), "nodes: must be at least one"),
        (lambda: drain_node(ABC, "d"), "node: must be in the ring, got 'd'"),
        (lambda: drain_node(drain_node(ABC, "a"), "a"), "node: must not be draining already, got 'a'"),
        (lambda: drain_node(first_state([spec("a")], replicas=1), "a"), "nodes: must be at least one"),
        (lambda: move_vnode(ABC, "a#128", "b"), "vnode: must be one of the 128 of a, got 'a#128'"),
        (lambda: move_vnode(ABC, "a#", "b"), "vnode: must be NODE#NUMBER, got 'a#'"),
        (lambda: move_vnode(ABC, "d#1", "b"), "node: must be in the ring, got 'd'"),
        (lambda: move_vnode(ABC, "a#1", "d"), "node: must be in the ring, got 'd'"),
        (lambda: move_vnode(ABC, "a#1", "a"), "node: must not be the one that has a#1 now, got 'a'"),
        (lambda: move_vnode(MOVED, "a#1", "b"), "node: must not be the one that has a#1 now, got 'b'"),
        (lambda: move_vnode(drain_node(ABC, "b"), "a#1", "b"), "node: must not be draining, got 'b'"),
        (lambda: move_vnode(drain_node(ABC, "b"), "b#1", "a"), "vnode: must be one of the 0 of b, got 'b#1'"),
        (lambda: set_replicas(ABC, 4), "replicas: must be 0 to 3, got 4"),
        (lambda: set_replicas(ABC, -1), "replicas: must be 0 to 3, got -1"),
        (lambda: set_replicas(ABC, 1), "replicas: must differ from what it is, got 1"),
        (lambda: set_replicas(msgspec.structs.replace(ABC, epoch=(1 << 63) - 1), 2), "epoch: must be 1 to"),
    ],
)
def test_refused(change: Callable[[], RingState], text: str) -> None:
    with pytest.raises(RingError) as refused:
        change()
    assert str(refused.value).startswith(text)


def test_ring_after_every_change_is_the_ring_of_its_state() -> None:
    ring = ring_of([spec("a"), spec("b")])
    assert ring.state.replicas == ring.replicas == 1
    assert ring.version == ring.state.version


def test_crowded_domain_is_named() -> None:
    state = first_state(
        [spec("a", domain="r1"), spec("b", domain="r1"), spec("c"), spec("d")], replicas=1
    )
    assert crowded_domain(state) == (
        "failure domain r1 holds 50% of the ring (256 of 512 vnodes of 3 domains): "
        "give its nodes less weight, or add nodes elsewhere"
    )


def test_nothing_is_crowded_among_equals_or_among_two() -> None:
    assert crowded_domain(ABC) == ""
    assert crowded_domain(first_state([spec("a", weight=9.0), spec("b")], replicas=1)) == ""


def test_moved_vnodes_count_where_they_are_and_draining_nodes_do_not() -> None:
    moved = crowded_domain(move_vnode(ABC, "a#1", "b"))
    assert moved.startswith("failure domain b holds 34% of the ring (129 of 384 vnodes of 3 domains)")
    assert crowded_domain(MOVED) == ""  # one came and one went, everywhere
    assert crowded_domain(drain_node(ABC, "a")) == ""
    ignored = msgspec.structs.replace(
        add_node(drain_node(ABC, "c"), spec("d")), overrides={"a#1": "c", "c#1": "a"}
    )
    assert crowded_domain(ignored) == ""
