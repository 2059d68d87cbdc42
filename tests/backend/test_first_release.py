"""A process that begins while `current` names a release that does not pass: what serves, and what is said."""

import pytest

from engines import ReleaseError
from engines.history import HISTORY, Served, append_history
from tests.backend.swap_rig import Shelf, SwapRig
from tests.waiting import wait_until

PROMPT = list(range(5, 75))


@pytest.fixture(scope="module")
def stocked(tmp_path_factory):
    made = Shelf(tmp_path_factory.mktemp("shelf"))
    made.add("a", release=1)
    made.add("unsigned", release=2)
    made.add_corrupt("corrupt", like="a")
    (made.folder(made.digests["unsigned"]) / "model.sig").unlink()
    return made


@pytest.fixture
def shelf(stocked):
    """Nothing was current before; `corrupt` is now."""
    (stocked.version / HISTORY).unlink(missing_ok=True)
    stocked.point("corrupt")
    return stocked


def was_current(shelf, *names):
    for at, name in enumerate(names):
        append_history(shelf.version, Served(shelf.digests[name], 60.0 * at))


@pytest.mark.parametrize("mode", ["side_by_side", "drain"])
@pytest.mark.parametrize("before", [["a"], ["a", "unsigned"], ["unsigned", "a", "corrupt"]])
def test_the_latest_release_before_that_passes_serves(shelf, mode, before, caplog):
    was_current(shelf, *before)
    with SwapRig(shelf, swap=mode, cache="off") as rig:
        assert rig.service.release == shelf.digests["a"]
        wait_until(lambda: rig.recorded.value("swap_refusals_total", reason="digest") == 1)
        assert rig.ask(PROMPT, max_tokens=2).release == shelf.digests["a"][:16]
    said = [line for line in caplog.text.splitlines() if "does not load: " in line]
    assert [("weights.bin" in line, "model.sig" in line) for line in said] == [
        (True, False), *[(False, True)] * (before[-1] == "unsigned")
    ]  # fmt: skip
    assert f"begins with release 1 ({shelf.digests['a'][:16]}), which was current before" in caplog.text


@pytest.mark.parametrize("before", [[], ["unsigned"]])
def test_without_one_that_passes_the_load_is_refused_for_what_current_was(shelf, before):
    was_current(shelf, *before)
    with pytest.raises(ReleaseError, match=r"^digest: .*weights\.bin"):
        SwapRig(shelf, cache="off")


def test_with_swap_off_a_load_means_current(shelf):
    was_current(shelf, "a")
    with pytest.raises(ReleaseError, match=r"^digest: "):
        SwapRig(shelf, swap="off", cache="off")
