"""What `make test-gpu` checks of sampling, in small on tensors of the host; and that broken samplers fail."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from backend.sampling import NumpySampler, Sampled, SamplerRow, TorchSampler
from engines.build import BuildOptions, build_release
from engines.contract import Engine
from engines.decoder import Decoder
from engines.options import EngineOptions
from tests.conftest import open_release
from tests.gpu import checks, sampler_checks

Floats = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def release(small_decoder: Decoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = BuildOptions(precision="fp32", lanes=4, max_seq_len=120, max_prefill_tokens=64)
    home = tmp_path_factory.mktemp("r")
    return build_release(small_decoder, home, model="small", release=1, options=options)


@pytest.fixture(scope="module")
def engine(release: Path) -> Iterator[Engine]:
    opened = open_release(release, EngineOptions(threads=2))
    yield opened
    opened.close()


def place(values: Floats) -> Floats:
    return values


def check(number: str, engine: Engine, sampler: TorchSampler) -> str:
    if number == "agree":
        return sampler_checks.forms_agree(engine, sampler)
    values, _ = sampler_checks.some_logits(engine)
    alone = sampler_checks.rows_are_on_their_own
    one = alone if number == "alone" else sampler_checks.spoiled_rows_fail_alone
    return one(values, sampler, place=place)


class Broken(TorchSampler):
    """One thing wrong at a time, on the way in or out."""

    def sample(
        self, logits: Any, rows: Sequence[SamplerRow], *, allowed_mask: npt.NDArray[np.int32] | None = None
    ) -> Sampled:
        return super().sample(self.changed(logits), rows, allowed_mask=self.mask(allowed_mask))

    def changed(self, logits: Any) -> Any:
        return logits

    def mask(self, mask: npt.NDArray[np.int32] | None) -> npt.NDArray[np.int32] | None:
        return mask


class NoMask(Broken):
    def mask(self, mask: npt.NDArray[np.int32] | None) -> None:
        return None


class NoFilters(TorchSampler):
    def _plan_of(self, rows: Sequence[SamplerRow]) -> Any:
        plan = super()._plan_of(rows)
        object.__setattr__(plan, "filters", (False, False, False))
        return plan


class NoPenalties(TorchSampler):
    def _plan_of(self, rows: Sequence[SamplerRow]) -> Any:
        plan = super()._plan_of(rows)
        object.__setattr__(plan, "penalised", [])
        object.__setattr__(plan, "rates", plan.rates[:, :0])
        return plan


class ColdLogits(Broken):
    """Reads what an earlier step left."""

    last: Floats | None = None

    def changed(self, logits: Any) -> Any:
        last, self.last = self.last, np.array(logits)
        return logits if last is None or last.shape != logits.shape else last


class ByBatch(Broken):
    """Rounds by how many rows there are."""

    def changed(self, logits: Any) -> Any:
        return (logits * np.float32(1 + 1e-3 * len(logits))).astype(np.float32)


class SpreadsNaN(Broken):
    """One row that is no number spoils its neighbours."""

    def changed(self, logits: Any) -> Any:
        broken = ~np.isfinite(logits).all(axis=1)
        return np.where((broken | np.roll(broken, 1))[:, None], np.float32(np.nan), logits)


class HidesNaN(Broken):
    def changed(self, logits: Any) -> Any:
        return np.nan_to_num(logits)


def make(kind: type[TorchSampler], engine: Engine) -> TorchSampler:
    return kind(engine.spec.geometry.vocab_size, lanes=engine.spec.lanes)


@pytest.mark.parametrize("number", ["agree", "alone", "spoiled"])
def test_a_right_sampler_passes(engine: Engine, number: str) -> None:
    assert check(number, engine, sampler_checks.device_sampler(engine, "cpu"))


@pytest.mark.parametrize(
    ("number", "kind", "complaint"),
    [
        ("agree", NoMask, "in numpy|nothing is drawn"),
        ("agree", NoFilters, "in numpy|tokens differ"),
        ("agree", NoPenalties, "in numpy|nothing is drawn"),
        ("agree", ColdLogits, "in numpy|nothing is drawn|logprob"),
        ("alone", ByBatch, "depends on the rows beside it"),
        ("spoiled", SpreadsNaN, "failed rows"),
        ("spoiled", HidesNaN, "failed rows"),
    ],
)
def test_a_broken_sampler_fails(
    engine: Engine, number: str, kind: type[TorchSampler], complaint: str
) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check(number, engine, make(kind, engine))


def test_ten_swaps_are_sampled_with_one_sampler_for_as_long_as_lanes_go_on(release: Path) -> None:
    made: list[NumpySampler] = []

    def open_next(number: int, serving: Engine | None) -> Engine:
        return open_release(release, EngineOptions(threads=2))

    def make_sampler(engine: Engine) -> NumpySampler:
        made.append(NumpySampler(engine.spec.geometry.vocab_size))
        return made[-1]

    opening: Callable[[int, Engine | None], Engine] = sampler_checks.sampled_swaps(open_next, make_sampler)
    said = checks.swaps_leave_memory_flat(opening, dict, slack={}, limit=0.0)
    assert said.startswith("10 swaps, 10 with live lanes")
    assert len(made) == 1
