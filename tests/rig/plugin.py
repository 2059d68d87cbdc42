"""The fixture `rig`: a machine with a GPU that is none, for tests of the TensorRT engine."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import pytest

from tests.rig import build, tensorrt_double
from tests.rig.driver import StandIn


@dataclass(frozen=True, slots=True)
class Rig:
    """`gpu` is the stand-in driver, `trt` the tensorrt double (both one per process)."""

    gpu: StandIn
    trt: tensorrt_double.Faults


@pytest.fixture(scope="session")
def rig_parts() -> Iterator[Rig]:
    """Builds and loads the rig; skips with the reason where this machine cannot build it."""
    try:
        parts = build.build()
    except build.Missing as missing:
        pytest.skip(f"GPU rig: {missing}")
    gpu = StandIn(parts.libcuda)
    gpu.unplug()
    sys.path.append(str(parts.site))
    yield Rig(gpu=gpu, trt=tensorrt_double.Faults())
    sys.path.remove(str(parts.site))


@pytest.fixture
def rig(rig_parts: Rig) -> Iterator[Rig]:
    """A plugged-in GPU of 2 GiB, compute capability 8.0, for one test.

    Afterwards: nothing allocated that was not before, no context left on the thread, and no complaints of the
    driver that the test did not take.
    """
    yield from _plugged(rig_parts)


@pytest.fixture(scope="module")
def module_rig(rig_parts: Rig) -> Iterator[Rig]:
    """The same for a whole module, where engines outlive a test."""
    yield from _plugged(rig_parts)


def _plugged(parts: Rig) -> Iterator[Rig]:
    gpu = parts.gpu
    module: ModuleType = tensorrt_double.module(gpu, parts.trt)
    before, plugged = sys.modules.get("tensorrt"), gpu.plugged
    sys.modules["tensorrt"] = module
    gpu.plug()
    gpu.take_complaints()
    held, depth = gpu.held, gpu.context_depth
    try:
        yield parts
        left = gpu.forget_failures()
        complaints = gpu.take_complaints()
        assert complaints == [], complaints
        came = (left, parts.trt.after)
        assert came == (0, {}), f"a failure that the test asked for never came: {came}"
        assert gpu.held == held, (gpu.held, held)
        assert gpu.context_depth == depth, "a context was pushed and never popped"
    finally:
        gpu.forget_failures()
        gpu.forgive()
        gpu.take_complaints()
        parts.trt.heal()
        (gpu.plug if plugged else gpu.unplug)()  # the module's, for a test inside it
        if before is None:
            del sys.modules["tensorrt"]
        else:
            sys.modules["tensorrt"] = before
