"""A whole service on the rig: the TensorRT engine under scheduler, cache, sampler and swap, without Triton.

What the service promises of any engine is tested in tests/backend on the CPU engine; here it is that the two
fit together, threads and memory included. Greedy tokens of the small decoder have wide margins, so that they
are the same although half precision is not exact.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.build_options import BuildOptions
from tests.backend.swap_rig import Shelf, SwapRig
from tests.engines.test_tensorrt_failures import break_device, mend_device
from tests.rig.plugin import Rig
from tests.waiting import wait_until

OPTIONS = BuildOptions(
    target="tensorrt", precision="float16", lanes=4, max_seq_len=250, block_tokens=16, max_prefill_tokens=128
)
PROMPT = list(range(5, 75))
TOKENS = 60


@pytest.fixture(scope="module")
def stocked(module_rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    """a and b are equal weights; c has others."""
    shelf = Shelf(tmp_path_factory.mktemp("shelf"))
    for number, (name, seed) in enumerate((("a", 1), ("b", 1), ("c", 2)), 1):
        shelf.add(name, release=number, seed=seed, options=OPTIONS)
    return shelf


@pytest.fixture
def shelf(rig: Rig, stocked: Shelf) -> Shelf:
    """Every test begins on release a."""
    stocked.point("a")
    return stocked


@pytest.fixture
def service(shelf: Shelf, tmp_path: Path) -> Iterator[SwapRig]:
    with SwapRig(shelf, arenas=tmp_path) as opened:
        yield opened


@pytest.fixture(scope="module")
def alone(stocked: Shelf, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """What each release says to the prompt when it has nothing else to do."""
    said = {}
    for name in ("a", "c"):
        stocked.point(name)
        with SwapRig(stocked, swap="off", arenas=tmp_path_factory.mktemp(name)) as opened:
            said[name] = opened.ask(PROMPT, no_cache=True, max_tokens=TOKENS).ids
    assert said["a"] != said["c"]
    return said


def test_a_cached_prefix_is_found_and_says_the_same(service: SwapRig, alone: dict[str, list[int]]) -> None:
    first = service.ask(PROMPT, max_tokens=TOKENS)
    again = service.ask(PROMPT, max_tokens=TOKENS)
    batch = [service.start(PROMPT, max_tokens=TOKENS) for _ in range(6)]
    assert (first.cached, again.cached) == (0, 64)
    assert [caller.wait().ids for caller in (first, again, *batch)] == [alone["a"]] * 8


def test_blocks_travel_between_the_gpu_and_page_locked_memory(rig: Rig, shelf: Shelf, tmp_path: Path) -> None:
    with SwapRig(shelf, arenas=tmp_path, lane_ttl_s=0.0) as opened:
        wait_until(lambda: rig.gpu.held.registered_bytes > 0)
        arena, detours = rig.gpu.held.registered_bytes, rig.gpu.pageable_copies
        assert opened.ask(PROMPT, max_tokens=4).cached == 0
        assert rig.gpu.pageable_copies == detours
        assert opened.ask(PROMPT, max_tokens=4).cached == 64  # the first restore makes its staging memory
        wait_until(lambda: rig.gpu.held.registered_bytes > arena)
        detours, copies = rig.gpu.pageable_copies, rig.gpu.calls("cuMemcpy3DAsync")
        assert opened.ask(PROMPT, max_tokens=4).cached == 64
        assert rig.gpu.calls("cuMemcpy3DAsync") - copies == 4
        assert rig.gpu.pageable_copies == detours
    assert rig.gpu.held.registered_bytes == 0


def test_live_streams_keep_their_kv_through_a_swap(
    rig: Rig, service: SwapRig, alone: dict[str, list[int]]
) -> None:
    service.slow_down()
    running = [service.start(PROMPT, no_cache=True, max_tokens=TOKENS) for _ in range(3)]
    assert running[0].first.wait(30)
    rig.gpu.restart_peak()
    before = rig.gpu.held.device_bytes
    service.swap("b")
    assert not running[0].done.is_set(), "the streams ended before the swap"
    assert [caller.wait().ids for caller in running] == [alone["a"]] * 3
    assert service.ask(PROMPT, no_cache=True, max_tokens=TOKENS).ids == alone["a"]
    wait_until(lambda: rig.gpu.held.device_bytes == before)
    assert rig.gpu.peak_bytes < 2 * before, "two pools at a time"


def test_another_identity_serves_newcomers_while_the_old_finish(
    rig: Rig, service: SwapRig, alone: dict[str, list[int]]
) -> None:
    before = rig.gpu.held.device_bytes
    hurry = service.slow_down()
    old = [service.start(PROMPT, no_cache=True, max_tokens=TOKENS) for _ in range(3)]
    assert old[0].first.wait(30)
    service.swap("c")
    new = service.start(PROMPT, no_cache=True, max_tokens=TOKENS)
    assert new.first.wait(30)
    assert not any(caller.done.is_set() for caller in old), "they ended before the swap"
    hurry.set()
    assert [caller.wait().ids for caller in old] == [alone["a"]] * 3
    assert new.wait().ids == alone["c"]
    wait_until(lambda: rig.gpu.held.device_bytes == before)  # the old is freed after its last sequence


@pytest.mark.parametrize("failure", ["deserialise", "memory", "context", "step"])
def test_a_candidate_that_fails_changes_nothing_for_those_who_ask(
    rig: Rig, service: SwapRig, alone: dict[str, list[int]], failure: str
) -> None:
    service.ask(PROMPT, max_tokens=4)
    held = rig.gpu.held
    match failure:
        case "deserialise":
            rig.trt.fail("deserialize_cuda_engine")
        case "memory":
            rig.gpu.fail("cuMemAlloc", nth=4, times=2)
        case "context":
            rig.trt.fail("create_execution_context", nth=2)
        case "step":
            rig.trt.fail("execute_async_v3", nth=2)
    service.shelf.point("b")
    wait_until(lambda: refused(service) == 1)
    assert service.service.release == service.shelf.digests["a"]
    assert service.ask(PROMPT, no_cache=True, max_tokens=TOKENS).ids == alone["a"]
    assert rig.gpu.held == held


def refused(service: SwapRig) -> float:
    """Swaps that were counted, for whatever reason but success."""
    counted = service.recorded.values.items()
    return sum(
        value for (name, labels), value in counted if name == "swaps_total" and ("reason", "ok") not in labels
    )


def test_a_gpu_that_is_lost_ends_streams_and_readiness(rig: Rig, shelf: Shelf, tmp_path: Path) -> None:
    """What is left is for the supervisor to replace; closing it frees what can be freed."""
    held = rig.gpu.held
    with SwapRig(shelf, arenas=tmp_path) as opened:
        assert opened.ask(PROMPT, max_tokens=4).ids
        hurry = opened.slow_down()
        running = [opened.start(PROMPT, no_cache=True, max_tokens=TOKENS) for _ in range(3)]
        assert all(caller.first.wait(30) for caller in running)
        serving = opened.service._loop.serving
        assert serving is not None
        break_device(rig, serving._engine)  # type: ignore[arg-type]
        hurry.set()
        assert all("GPU 0 is lost" in str(caller.wait().last.error) for caller in running)
        wait_until(lambda: opened.service._watchdog.problem is not None)
        assert not opened.service.ready
        assert "step-loop has ended" in str(opened.service._watchdog.problem)
        assert opened.ask(PROMPT, max_tokens=4).last.error is not None
    mend_device(rig)
    assert rig.gpu.held == held


def test_a_closed_service_holds_nothing(rig: Rig, shelf: Shelf, tmp_path: Path) -> None:
    held = rig.gpu.held
    for _ in range(3):
        with SwapRig(shelf, arenas=tmp_path) as opened:
            opened.ask(PROMPT, max_tokens=4)
            assert rig.gpu.held.device_bytes > held.device_bytes
        assert rig.gpu.held == held
