"""Hot swap on real parts: small engines, the real load chain, the real cache, streams that run meanwhile."""

import pytest

from backend.generation import FinishReason
from tests.backend.swap_rig import Shelf, SwapRig
from tests.waiting import wait_until

PROMPT = list(range(5, 75))
OTHER = list(range(100, 160))
LONG = {"max_tokens": 150}
BOUND = 1 << 20
SEEDED = {"max_tokens": 150, "temperature": 0.9, "seed": 11}


@pytest.fixture(scope="module")
def stocked(tmp_path_factory):
    """a and b are equal weights; c has others."""
    shelf = Shelf(tmp_path_factory.mktemp("shelf"))
    shelf.add("a", release=1)
    shelf.add("b", release=2)
    shelf.add("c", release=3, seed=2)
    shelf.add_corrupt("corrupt", like="a")
    return shelf


@pytest.fixture
def shelf(stocked):
    """Every test begins on release a."""
    stocked.point("a")
    return stocked


@pytest.fixture(scope="module")
def alone(stocked):
    """What lone runs without any swap say: (release, options) → ids."""
    said = {}
    for name in ("a", "c"):
        stocked.point(name)
        with SwapRig(stocked, swap="off") as rig:
            for key, options in (("greedy", LONG), ("seeded", SEEDED)):
                said[name, key] = rig.ask(PROMPT, no_cache=True, **options).ids
    return said


@pytest.mark.parametrize(("key", "options"), [("greedy", LONG), ("seeded", SEEDED)])
def test_live_streams_go_on_with_their_kv_and_say_the_same(shelf, alone, key, options):
    with SwapRig(shelf) as rig:
        rig.slow_down()
        running = [rig.start(PROMPT, no_cache=True, **options) for _ in range(3)]
        assert running[0].first.wait(30)
        rig.swap("b")
        assert not running[0].done.is_set(), "the streams ended before the swap"
        for caller in running:
            assert caller.wait().ids == alone["a", key]
            assert caller.last.finish is FinishReason.LENGTH
            assert caller.release == shelf.digests["a"][:16]
        after = rig.ask(PROMPT, no_cache=True, **options)
    assert after.ids == alone["a", key]
    assert after.release == shelf.digests["b"][:16]


def test_another_identity_serves_newcomers_while_the_old_finish(shelf, alone):
    with SwapRig(shelf) as rig:
        hurry = rig.slow_down()
        old = [rig.start(PROMPT, no_cache=True, **LONG) for _ in range(6)]
        assert old[0].first.wait(30)
        rig.swap("c")
        new = rig.start(PROMPT, no_cache=True, **LONG)
        assert new.first.wait(30)
        assert not any(caller.done.is_set() for caller in old), "they ended before the swap"
        hurry.set()
        assert [caller.wait().ids for caller in old] == [alone["a", "greedy"]] * 6
        assert new.wait().ids == alone["c", "greedy"]
        assert new.release == shelf.digests["c"][:16]
        assert {caller.release for caller in old} == {shelf.digests["a"][:16]}


def test_drain_finishes_what_runs_and_reads_the_rest_under_the_next(shelf, alone):
    with SwapRig(shelf, swap="drain", drain_s=30.0) as rig:
        hurry = rig.slow_down()
        callers = [rig.start(PROMPT, no_cache=True, **LONG) for _ in range(7)]
        assert callers[0].first.wait(30)
        shelf.point("c")
        wait_until(lambda: rig.service.release != shelf.digests["a"])
        hurry.set()
        late = rig.start(PROMPT, no_cache=True, **LONG)
        names = {shelf.digests["a"][:16]: "a", shelf.digests["c"][:16]: "c"}
        by = [names[caller.wait().release] for caller in [*callers, late]]
        assert [caller.ids for caller in [*callers, late]] == [alone[name, "greedy"] for name in by]
        assert by == ["a"] * 4 + ["c"] * 4


@pytest.mark.parametrize("host_bytes", [BOUND, None], ids=["all for one process", "default shares"])
def test_a_roll_back_finds_its_blocks(shelf, host_bytes, monkeypatch, tmp_path):
    monkeypatch.setattr("cachemgr.arena_files.default_bound", lambda directory, *, held: BOUND)
    with SwapRig(shelf, host_bytes=host_bytes, arenas=tmp_path, lane_ttl_s=0.0) as rig:
        first = rig.ask(PROMPT, max_tokens=4)
        rig.swap("c")
        other = rig.ask(PROMPT, max_tokens=4)
        rig.swap("a")
        again = rig.ask(PROMPT, max_tokens=4)
    assert (first.cached, other.cached) == (0, 0)
    assert again.cached == 64
    assert again.ids == first.ids
