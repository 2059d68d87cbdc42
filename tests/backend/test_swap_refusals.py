"""Whatever refuses a release in a swap: the old one goes on, the reason is counted, nothing of it remains."""

import gc
import re
import shutil
import threading
import weakref

import msgspec
import pytest

import engines.loading
import engines.opening
from backend.errors import EngineFailed
from backend.process import Process
from engines import StepError, sign_release
from engines.loading import load_release_dir
from engines.manifest import MANIFEST, encode_manifest, parse_manifest
from engines.ort import OrtEngine
from tests.backend.swap_rig import Shelf, SwapRig
from tests.waiting import wait_until

PROMPT = list(range(5, 75))
MODES = ["side_by_side", "drain"]


@pytest.fixture(scope="module")
def stocked(tmp_path_factory):
    shelf = Shelf(tmp_path_factory.mktemp("shelf"))
    for name, number in (("a", 1), ("b", 2), ("unsigned", 3)):
        shelf.add(name, release=number)
    shelf.add("c", release=4, seed=2)
    shelf.add_corrupt("corrupt", like="a")
    (shelf.folder(shelf.digests["unsigned"]) / "model.sig").unlink()
    changed(shelf, "other model", model="other")
    changed(shelf, "text", chat_template="{% for %}")
    golden = parse_manifest((shelf.folder(shelf.digests["a"]) / MANIFEST).read_bytes()).golden
    changed(shelf, "golden", golden=msgspec.structs.replace(golden, token=(golden.token + 1) % 300))
    return shelf


def changed(shelf, name, **fields):
    """Release b with other words in its manifest, signed."""
    made = shelf.root / f"made-{len(shelf.digests)}"
    shutil.copytree(shelf.root / "built-b" / shelf.digests["b"], made)
    manifest = parse_manifest((made / MANIFEST).read_bytes())
    (made / MANIFEST).write_bytes(encode_manifest(msgspec.structs.replace(manifest, **fields)))
    sign_release(made, shelf.root / "keys" / "release.key")
    shelf.digests[name] = load_release_dir(made, trust=shelf.trust).digest
    shutil.copytree(made, shelf.folder(shelf.digests[name]))


@pytest.fixture
def shelf(stocked):
    stocked.point("a")
    return stocked


@pytest.fixture
def engines_made(monkeypatch):
    """A weak reference to each engine that is opened."""
    made = []
    create = OrtEngine.__init__

    def noted(engine, *arguments, **options):
        made.append(weakref.ref(engine))
        create(engine, *arguments, **options)

    monkeypatch.setattr(OrtEngine, "__init__", noted)
    return made


STAGES = {
    "unsigned": (None, None, "signature"),
    "corrupt": (None, None, "digest"),
    "other model": (None, None, "model"),
    "golden": (None, None, "golden"),
    "text": (None, None, "config"),
    "memory": (engines.opening, "require_memory", "memory"),
    "prewarm": (OrtEngine, "prewarm", "prewarm"),
    "adopt": (OrtEngine, "adopt_kv", "internal"),
    "our own": (Process, "assemble", "internal"),
}
ERRORS = {"memory": MemoryError, "prewarm": StepError, "adopt": AssertionError}


@pytest.mark.parametrize(
    ("stage", "mode"),
    [(stage, mode) for stage in STAGES for mode in MODES if (stage, mode) != ("adopt", "drain")],
)
def test_every_stage_that_fails_leaves_the_old_release(shelf, stage, mode, monkeypatch, engines_made, caplog):
    owner, name, reason = STAGES[stage]
    with SwapRig(shelf, swap=mode, cache="off") as rig:
        before = rig.ask(PROMPT, max_tokens=20).ids
        threads = threading.active_count()
        if owner is not None:
            real, left = getattr(owner, name), [ERRORS.get(stage, ZeroDivisionError)]

            def once(*arguments, **options):
                if left:
                    raise left.pop()("made to fail")
                return real(*arguments, **options)

            monkeypatch.setattr(owner, name, once)
        shelf.point(stage if owner is None else "b")
        wait_until(lambda: rig.swaps(reason) == 1)
        wait_until(lambda: rig.service.release == shelf.digests["a"])
        assert rig.ask(PROMPT, max_tokens=20).ids == before
        assert rig.recorded.value("swap_refusals_total", reason=reason) == 1
        assert threading.active_count() == threads
        alive = [made() for made in engines_made if made() is not None]
        assert [engine for engine in alive if engine.spec.digest != shelf.digests["a"]] == []
        lines = [line for line in caplog.text.splitlines() if "refused, " in line]
        assert len(lines) == 1
        shelf.point("a")


def test_a_refused_release_is_not_tried_again_until_it_changes(shelf, monkeypatch):
    loads = []
    real = engines.loading._load
    monkeypatch.setattr(
        engines.loading, "_load", lambda *arguments, **options: loads.append(1) or real(*arguments, **options)
    )
    with SwapRig(shelf) as rig:
        shelf.point("corrupt")
        wait_until(lambda: rig.swaps("digest") == 1)
        tried, looks = len(loads), []
        look = rig.service._swapper._look
        monkeypatch.setattr(rig.service._swapper, "_look", lambda: looks.append(1) or look())
        wait_until(lambda: len(looks) >= 5)
        assert len(loads) == tried
        path = shelf.folder(shelf.digests["corrupt"]) / "model.sig"
        path.write_bytes(path.read_bytes() + b" ")
        wait_until(lambda: len(loads) > tried)
        rig.swap("b")
        assert rig.ask(PROMPT, max_tokens=2).release == shelf.digests["b"][:16]


def test_a_refused_release_that_is_deployed_again_is_tried_again(shelf, monkeypatch):
    """What was in its way, such as too little memory, may be no fault of its own."""
    real, left = engines.opening.require_memory, [MemoryError]

    def once(*arguments, **options):
        if left:
            raise left.pop()("made to fail")
        return real(*arguments, **options)

    with SwapRig(shelf, cache="off") as rig:
        monkeypatch.setattr(engines.opening, "require_memory", once)
        shelf.point("b")
        wait_until(lambda: rig.swaps("memory") == 1)
        assert rig.service.release == shelf.digests["a"]
        rig.swap("b")
        assert rig.swaps("memory") == 1


def test_when_the_old_one_cannot_come_back_everybody_is_told_until_one_loads(shelf, monkeypatch):
    monkeypatch.setattr("backend.swapper.RETRY_S", (0.05, 0.1))
    with SwapRig(shelf, swap="drain") as rig:
        rig.service._swapper._retry_s = 0.05
        hidden = shelf.folder(shelf.digests["a"])
        hidden.rename(hidden.with_name(".hidden"))
        try:
            shelf.point("corrupt")
            wait_until(lambda: not rig.service.ready)
            told = rig.ask(PROMPT, max_tokens=2).last.error
            assert isinstance(told, EngineFailed)
            why = (
                "no release can be loaded: digest: expected SHA-256 .*; nor the one before: folder: expected"
            )
            assert re.match(why, str(told))
            wait_until(lambda: rig.recorded.value("serving_release") == 0)
            shelf.point("b")
            wait_until(lambda: rig.service.ready)
            assert rig.ask(PROMPT, max_tokens=2).release == shelf.digests["b"][:16]
        finally:
            hidden.with_name(".hidden").rename(hidden)


def test_what_is_gone_comes_back_by_itself(shelf, monkeypatch):
    monkeypatch.setattr("backend.swapper.RETRY_S", (0.05, 0.1))
    with SwapRig(shelf, swap="drain") as rig:
        rig.service._swapper._retry_s = 0.05
        hidden = shelf.folder(shelf.digests["a"])
        hidden.rename(hidden.with_name(".hidden"))
        shelf.point("corrupt")
        try:
            wait_until(lambda: not rig.service.ready)
        finally:
            hidden.with_name(".hidden").rename(hidden)
        wait_until(lambda: rig.service.ready)
        assert rig.ask(PROMPT, max_tokens=2).release == shelf.digests["a"][:16]


def test_off_says_once_that_current_changed(shelf, caplog):
    caplog.set_level("INFO")
    with SwapRig(shelf, swap="off") as rig:
        shelf.point("b")
        wait_until(lambda: "swap is off" in caplog.text)
        looks = []
        look = rig.service._swapper._look
        rig.service._swapper._look = lambda: looks.append(1) or look()
        wait_until(lambda: len(looks) >= 4)
        assert rig.service.release == shelf.digests["a"]
    assert caplog.text.count("swap is off") == 1


@pytest.mark.parametrize("names", [("b", "a"), ("c", "a")], ids=["same KV", "other KV"])
def test_twenty_swaps_leave_nothing_behind(shelf, engines_made, names):
    with SwapRig(shelf) as rig:
        said = dict.fromkeys(("a", *names))
        threads = threading.active_count()
        gc.disable()
        try:
            for turn in range(20):
                name = names[turn % 2]
                rig.swap(name)
                ids = rig.ask(PROMPT, max_tokens=4).ids
                assert said.setdefault(name, ids) in (None, ids)
                said[name] = ids
            wait_until(lambda: rig.swaps("ok") == 20)
            wait_until(lambda: sum(made() is not None for made in engines_made) == 1)
        finally:
            gc.enable()
        assert threading.active_count() <= threads + 1
        assert rig.recorded.value("serving_release") in (1, 2, 4)
