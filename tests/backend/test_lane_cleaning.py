"""A row that is no number spoils its lane, which is cleaned before anybody else gets it."""

import logging
from pathlib import Path

import numpy as np
import pytest

from backend.sampling.contract import BROKEN
from engines import DeviceLostError, Logits
from engines.decoder import Decoder
from tests.backend.doubles import VOCAB, FakeEngine, Rig
from tests.gpu import checks
from tests.rig.plugin import Rig as GpuRig
from tests.rig.releases import open_on_rig, rig_release

MAX_SEQ_LEN = 600  # 37 whole blocks of 16 and 8 positions more; windows of 256, 512 and 608


class Breaking(FakeEngine):
    """From the token `after` on, logits are no numbers."""

    after = 0

    def _logits(self, rows):
        logits = super()._logits(rows)
        if max(position for _, position in rows) >= self.after:
            return Logits(np.full((len(rows), VOCAB), np.nan, np.float32))
        return logits


@pytest.mark.parametrize("after", [1, 18, 23], ids=["in the prompt", "with its last token", "of the answer"])
def test_the_lane_of_a_broken_row_is_cleaned_as_far_as_it_was_written(after: int) -> None:
    engine = Breaking()
    engine.after = after
    rig = Rig(engine=engine)
    rig.engine.kv[:] = 77
    _, sink = rig.ask(range(5, 23), max_tokens=12)
    rig.run()
    assert str(sink.last.error) == BROKEN
    written = int((rig.engine.kv[0] != 77).sum())
    assert written >= after
    assert not rig.engine.kv[0, :written].any()
    assert (rig.engine.kv[1:] == 77).all()


def test_an_engine_that_cannot_clean_is_named_and_its_loop_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(engine=Breaking())
    rig.engine.fail_on = {"import"}
    _, sink = rig.ask([3, 4, 5])
    with caplog.at_level(logging.ERROR):
        rig.run()
    assert str(sink.last.error) == BROKEN
    assert "lane 0 keeps what is no number" in caplog.text
    rig.engine.after = 1000
    _, sink = rig.ask([3, 4, 5])
    rig.run()
    assert sink.last.error is None


def test_a_lost_gpu_is_nothing_to_go_on_with() -> None:
    rig = Rig(engine=Breaking())

    def lost(*arguments):
        raise DeviceLostError("GPU 0 is lost")

    rig.engine.import_blocks = lost
    rig.ask([3, 4, 5])
    with pytest.raises(DeviceLostError):
        rig.step()


@pytest.fixture(scope="module")
def release(module_rig: GpuRig, small_decoder: Decoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rig_release(small_decoder, tmp_path_factory.mktemp("r"), max_seq_len=MAX_SEQ_LEN)


def test_a_lane_full_of_nan_answers_again_on_a_gpu(rig: GpuRig, release: Path) -> None:
    """The window reaches beyond what a sequence wrote, and weight 0 times NaN is NaN."""
    engine = open_on_rig(release)
    assert "would have failed" in checks.nan_lanes_answer_again(engine, limit=0.0)
    engine.close()


def test_a_lane_of_which_a_block_is_left_out_fails_the_check(rig: GpuRig, release: Path) -> None:
    engine = open_on_rig(release)
    real = engine.import_blocks

    def all_zeros_but_the_second(lane, blocks, payloads):
        first = 0 if payloads[0].any() else 2
        real(lane, blocks[:1], payloads[:1])
        real(lane, blocks[first:], payloads[first:])

    engine.import_blocks = all_zeros_but_the_second  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="cleaned: error nan"):
        checks.nan_lanes_answer_again(engine, limit=0.0)
    engine.close()
