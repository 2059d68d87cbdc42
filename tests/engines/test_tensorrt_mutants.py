"""The TensorRT engine broken in one way each: checks that it passes whole must fail, or prove nothing."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.contract import Engine
from engines.cuda import Device, Stream
from engines.decoder import Decoder
from engines.device_pool import DevicePool
from engines.errors import EngineError
from engines.tensorrt_step import StagedInputs
from tests.engines import behaviours
from tests.engines.test_reference import ignored_cache, upper_left_mask
from tests.gpu.on_host import OnHost
from tests.rig.plugin import Rig
from tests.rig.releases import Change, open_on_rig, rig_release

Check = Callable[[Engine], None]
CHECKS: tuple[Check, ...] = (
    behaviours.split_prefill_equals_whole,
    behaviours.decode_equals_prefill,
    behaviours.batch_equals_lone,
    behaviours.blocks_round_trip,
    behaviours.resumed_equals_computed,
    lambda engine: behaviours.idle_lanes_stay(engine, steps=60),
)


@pytest.fixture(scope="module")
def release(module_rig: Rig, small_decoder: Decoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rig_release(small_decoder, tmp_path_factory.mktemp("r"))


def caught(release: Path, check: Check, *, change: Change | None = None) -> bool:
    """Whether the check fails on an engine opened now."""
    engine = None
    try:
        engine = OnHost(open_on_rig(release, change=change))
        list(engine.prewarm())
        check(engine)
    except (AssertionError, EngineError):
        return True
    finally:
        if engine is not None:
            engine.close()
    return False


@pytest.mark.parametrize("check", CHECKS)
def test_the_engine_as_it_is_passes(rig: Rig, release: Path, check: Check) -> None:
    assert not caught(release, check)


@pytest.mark.parametrize(
    ("change", "check"),
    [
        (upper_left_mask, behaviours.split_prefill_equals_whole),
        (upper_left_mask, behaviours.decode_equals_prefill),
        (ignored_cache, behaviours.decode_equals_prefill),
        (ignored_cache, behaviours.resumed_equals_computed),
    ],
)
def test_a_wrong_graph_is_caught(rig: Rig, release: Path, change: Change, check: Check) -> None:
    assert caught(release, check, change=change)


def test_idle_rows_that_write_at_zero_are_caught(
    rig: Rig, release: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = StagedInputs._send

    def at_zero(self: StagedInputs) -> None:
        offset = self._offsets[2] // 8
        written = self._host.array[offset : offset + self._rows]
        written[written == self._positions - 1] = 0
        send(self)

    monkeypatch.setattr(StagedInputs, "_send", at_zero)
    assert caught(release, CHECKS[-1])


def test_an_engine_that_does_not_push_its_context_is_caught(
    rig: Rig, release: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engines.cuda import _translated

    engine = OnHost(open_on_rig(release))

    @contextmanager
    def not_pushed(self: Device) -> Iterator[None]:
        with _translated(self._cuda):
            yield

    with monkeypatch.context() as patch:
        patch.setattr(Device, "current", not_pushed)
        with pytest.raises(EngineError, match="invalid device context"):
            behaviours.decode_equals_prefill(engine)
        with pytest.raises(EngineError):
            behaviours.blocks_round_trip(engine)
    assert "no context is current on the calling thread" in rig.gpu.take_complaints()[0]
    engine.close()


@pytest.mark.parametrize(("field", "more"), [("device_pitch", 2), ("device_pitch", -2), ("device_rows", 1)])
def test_a_pitch_that_is_off_is_caught(
    rig: Rig, release: Path, monkeypatch: pytest.MonkeyPatch, field: str, more: int
) -> None:
    """By one element or one row: in imports and exports alike, or in one of them."""
    before = DevicePool.__init__

    def off(self: DevicePool, *arguments: Any, **named: Any) -> None:
        before(self, *arguments, **named)
        self._box = dataclasses.replace(self._box, **{field: getattr(self._box, field) + more})

    with monkeypatch.context() as patch:
        patch.setattr(DevicePool, "__init__", off)
        assert caught(release, behaviours.resumed_equals_computed)
    rig.gpu.take_complaints()  # a copy that leaves the pool is one
    box = Stream.upload_box

    def uploaded(self: Stream, address: int, source: Any, of: Any) -> None:
        box(self, address, source, dataclasses.replace(of, **{field: getattr(of, field) + more}))

    monkeypatch.setattr(Stream, "upload_box", uploaded)
    assert caught(release, behaviours.blocks_round_trip)
    rig.gpu.take_complaints()


def test_inputs_overwritten_too_early_are_caught(
    rig: Rig, release: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in reads page-locked memory when it runs a copy, not when it is asked for one."""
    monkeypatch.setattr("engines.cuda.Event.wait", lambda self: None)

    def pipelined(engine: Engine) -> None:
        """Two steps without reading the logits between them."""
        tokens = behaviours.some_tokens(engine, 60)
        expected = behaviours.prefill(engine, 0, tokens)
        inner = engine.engine  # type: ignore[attr-defined]
        inner.prefill(1, tokens[:30], 0)
        found = np.asarray(inner.prefill(1, tokens[30:], 30).array)[0]
        assert behaviours.same(engine, found, expected)

    assert caught(release, pipelined)
    monkeypatch.undo()
    assert not caught(release, pipelined)
