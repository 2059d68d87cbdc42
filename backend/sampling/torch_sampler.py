"""The sampler for logits in device memory: what goes back to the host is a token per row, not a vocabulary.

All work of a step is put on the stream that writes the logits: one small copy to the device (uniforms,
parameters, changed columns of histories; masks are a second one), the choice, one small copy back, and one
wait at the end. What is enqueued does not depend on data, so nothing in between waits. The definition of the
choice is the numpy form's (see `contract`); how it is made without sorting is told in `device_draw`.

Bits: a row's token depends on no other row and not on how many there are, as all sums are of integers.
Against the numpy form, weights differ by the rounding of exp in float32: a token may differ where u, or the
border of what the filters keep, lies within 1e-6 of the mass between two tokens.

Cost: about a hundred small operations for top-p. They are enqueued while the engine's step, which does not
wait either, is still running on the device.

Run were: everything on CPU tensors, and the choice of stream and address against a double of `torch.cuda`.
The CUDA path itself could not be run where this was written: it waits for `make test-gpu` on a GPU.

torch is imported when a sampler is wanted, here and nowhere else. Threads: one owner.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from backend.errors import EngineFailed
from backend.generation import SamplingParams
from backend.sampling.contract import BROKEN, NOTHING_ALLOWED, Sampled, SamplerRow
from backend.sampling.device_array import is_device_array, stream_of
from backend.sampling.device_draw import Slab, padded
from backend.sampling.device_history import DeviceHistories
from backend.sampling.device_page import DevicePage
from backend.sampling.device_plan import DevicePlan, DeviceStep
from backend.sampling.philox import uniforms as philox_uniforms
from backend.sampling.rows import SequenceRow

log = logging.getLogger(__name__)

Tensor = Any
Doubles = npt.NDArray[np.float64]
Mask = npt.NDArray[np.int32]
Uniforms = Callable[[npt.NDArray[np.uint64], npt.NDArray[np.uint64]], Doubles]

SLAB_TOKENS: Final = 1 << 21
"""Rows are worked on so many at a time that their vocabularies come to this: it bounds the work space."""

_GREEDY: Final = -1.0  # instead of a uniform


def import_torch() -> Any:
    """The torch module. Raises ImportError, or OSError if a library of it is missing."""
    import torch

    return torch


def unusable(device: str) -> str | None:
    """Why a sampler cannot work on `device` ("cuda:N"), in one line; None if it can."""
    try:
        torch = import_torch()
    except (ImportError, OSError) as error:
        return f"torch cannot be imported ({error})"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device"
    count = torch.cuda.device_count()
    index = torch.device(device).index or 0
    return None if index < count else f"torch sees {count} CUDA devices, which leaves out {device}"


def device_bytes(vocab_size: int, lanes: int) -> int:
    """Device memory that a sampler takes when it is made; histories of penalised sequences come on top."""
    return _slab_rows(vocab_size, lanes) * Slab.bytes_per_row(vocab_size)


class TorchSampler:
    """Sampler over tensors on one device; `vocab_size` is V of every step, `lanes` the most rows expected."""

    def __init__(
        self, vocab_size: int, *, lanes: int = 1, device: str = "cpu", uniforms: Uniforms = philox_uniforms
    ) -> None:
        """`device` is "cuda:N", or "cpu" for tests; `uniforms` makes the randomness (see NumpySampler).

        EngineFailed where the device has no room or fails.
        """
        self._torch = torch = import_torch()
        self._vocab_size = vocab_size
        self._device = device
        self._uniforms = uniforms
        self._plan = DevicePlan.of([], vocab_size)
        self._streams: dict[int, Any] = {}
        with self._errors_told():
            self._slab = Slab(torch, _slab_rows(vocab_size, lanes), vocab_size, device=device)
            self._histories = DeviceHistories(torch, vocab_size, device=device)
            self._asked = DevicePage(torch, torch.float64, device=device)
            self._masks = DevicePage(torch, torch.int32, device=device)
            self._answers = DevicePage(torch, torch.float64, device=device)
            self._bit = torch.arange(32, dtype=torch.int32, device=device)
            self._waiting()()  # the room was cleared on torch's own stream, steps run on the engine's

    def row(
        self,
        params: SamplingParams,
        prompt: npt.NDArray[np.int64],
        *,
        min_tokens: int = 0,
        eos_token_ids: Collection[int] = (),
        logprobs: bool = False,
    ) -> SequenceRow:
        """Start a sequence (see Sampler.row)."""
        return SequenceRow(
            params, prompt, min_tokens=min_tokens, eos_token_ids=eos_token_ids, logprobs=logprobs
        )

    def sample(self, logits: Any, rows: Sequence[SamplerRow], *, allowed_mask: Mask | None = None) -> Sampled:
        """Choose a token for every row of `logits` (see Sampler.sample).

        An error of the device, or of what the engine says about its logits, fails every row of the call.
        """
        if not rows:
            return Sampled(np.empty(0, dtype=np.int64))
        torch = self._torch
        try:
            with (
                self._errors_told(),
                torch.inference_mode(),
                self._on_stream(logits, len(rows)) as (values, synchronize),
            ):
                return self._choose(values, self._plan_of(rows), allowed_mask, synchronize=synchronize)
        except EngineFailed as error:
            self._histories.forget()
            log.error("%s", error)
            reason = EngineFailed(str(error))  # without a traceback, which would keep tensors
            return Sampled.nothing(len(rows), because=reason)

    def warm_up(self) -> None:
        """Choose a token in every way there is, so that no request pays for the first use of a kernel.

        EngineFailed where the device has no room or fails.
        """
        torch = self._torch
        params = SamplingParams(temperature=1.0, top_k=1, top_p=0.5, min_p=0.1, repetition_penalty=1.1)
        row = self.row(params, np.zeros(1, dtype=np.int64), min_tokens=1, eos_token_ids=(0,), logprobs=True)
        mask = np.full((1, -(-self._vocab_size // 32)), -1, dtype=np.int32)
        with self._errors_told(), torch.inference_mode():
            zeros = torch.zeros((1, self._vocab_size), dtype=torch.float32, device=self._device)
            self._choose(zeros, DevicePlan.of([row], self._vocab_size), mask, synchronize=self._waiting())

    @contextmanager
    def _errors_told(self) -> Iterator[None]:
        """Errors of the device, and of what the engine says about its logits, as EngineFailed in one line."""
        torch = self._torch
        try:
            yield
        except (EngineFailed, torch.OutOfMemoryError, torch.AcceleratorError) as error:
            first = str(error).splitlines()[0]
            raise EngineFailed(f"sampling on {self._device} failed: {first}") from error

    @contextmanager
    def _on_stream(self, logits: Any, rows: int) -> Iterator[tuple[Tensor, Callable[[], None]]]:
        """The logits as a tensor over the same memory, their stream made the current one; how to wait."""
        if not is_device_array(logits):
            yield self._from_host(logits, rows), self._waiting()
            return
        stream = self._stream_at(stream_of(logits, rows=rows, vocab_size=self._vocab_size))
        with self._torch.cuda.stream(stream):
            yield self._torch.as_tensor(logits, device=self._device), stream.synchronize

    def _stream_at(self, address: int | None) -> Any:
        cuda = self._torch.cuda
        if address is None:
            return cuda.default_stream(self._device)
        if address not in self._streams:
            cuda.empty_cache()  # torch keeps freed memory per stream: that of an engine before this one too
            self._streams[address] = cuda.ExternalStream(address, device=self._device)
        return self._streams[address]

    def _waiting(self) -> Callable[[], None]:
        if self._device == "cpu":
            return _no_wait
        wait: Callable[[], None] = self._torch.cuda.current_stream(self._device).synchronize
        return wait

    def _from_host(self, logits: npt.NDArray[np.float32], rows: int) -> Tensor:
        assert logits.shape == (rows, self._vocab_size)
        assert logits.dtype == np.float32
        own = logits if logits.flags.writeable else logits.copy()  # torch knows no read-only memory
        return self._torch.as_tensor(own, device=self._device)

    def _plan_of(self, rows: Sequence[SamplerRow]) -> DevicePlan:
        if list(rows) != self._plan.rows:
            own = [row for row in rows if isinstance(row, SequenceRow)]
            assert len(own) == len(rows), "rows were made by another kind of sampler"
            self._plan = DevicePlan.of(own, self._vocab_size)
        return self._plan

    def _choose(
        self, logits: Tensor, plan: DevicePlan, mask: Mask | None, *, synchronize: Callable[[], None]
    ) -> Sampled:
        """Enqueue everything, wait once, read the answer."""
        rows, fields = len(plan.rows), 5 if plan.wanting_logprobs else 3
        step = self._ship(plan, mask)
        answer = self._answers.room(fields * rows).view(fields, rows)
        for first in range(0, rows, self._slab.rows):
            part = slice(first, min(first + self._slab.rows, rows))
            self._choose_part(logits[part], plan, step, part, answer[:, part])
        told = self._answers.fetch(fields * rows).reshape(fields, rows)
        synchronize()
        return _read(told, plan.wanting_logprobs)

    def _ship(self, plan: DevicePlan, mask: Mask | None) -> DeviceStep:
        u = np.full(len(plan.rows), _GREEDY)
        if plan.drawing:
            positions = np.array([plan.rows[i].position for i in plan.drawing], dtype=np.uint64)
            u[plan.drawing] = self._uniforms(plan.seeds, positions)
        penalised = [plan.rows[i] for i in plan.penalised]
        slots, changed, ids, counts = self._histories.changes(penalised)
        going_on = [(i, row.eos) for i, row in enumerate(plan.rows) if row.must_go_on]
        banned_rows = [i for i, eos in going_on for _ in eos]
        banned = np.array([self._cell(i) + int(token) for i, eos in going_on for token in eos], dtype=float)
        first = np.array([self._cell(i) for i in plan.penalised], dtype=float)
        parts = [u, *plan.parameters, first, slots, plan.rates, banned, changed, ids, counts]
        shipped = self._asked.ship(parts)
        if len(changed):
            self._histories.apply(*shipped[9:])
        return DeviceStep(
            u=shipped[0],
            scale=shipped[1].float(),
            top_k=shipped[2].long(),
            top_p=shipped[3],
            min_p=shipped[4].float(),
            penalised_cells=shipped[5].long(),
            slots=shipped[6].long(),
            rates=shipped[7].float().view(3, len(penalised)),
            width=max((len(row.history or ()) for row in penalised), default=0),
            banned_rows=banned_rows,
            banned_cells=shipped[8].long(),
            mask=None if mask is None else self._masks.ship([mask])[0].view(mask.shape),
        )

    def _cell(self, row: int) -> int:
        """Where a row begins in its slab."""
        return row % self._slab.rows * self._slab.columns

    def _choose_part(
        self, logits: Tensor, plan: DevicePlan, step: DeviceStep, part: slice, answer: Tensor
    ) -> None:
        """Choose for the rows `part`; `answer` [fields, rows] takes what `_read` reads."""
        torch, slab = self._torch, self._slab
        raw_peaks, tokens = torch.max(logits, dim=1)
        source, peaks = logits, raw_peaks
        if step.adjusts:
            source = self._adjusted(logits, plan, step, part)
            peaks, tokens = torch.max(source, dim=1)
        if plan.wanting_logprobs:
            answer[4].copy_(slab.log_mass(logits, raw_peaks))
        if plan.drawing:
            slab.weigh(source, peaks, step.scale[part])
            by_k, by_p, by_least = plan.filters
            if by_k:
                slab.keep_top_k(step.top_k[part])
            if by_p:
                slab.keep_top_p(step.top_p[part])
            if by_least:
                slab.keep_min_p(step.min_p[part])
            u = step.u[part]
            tokens = torch.where(u < 0, tokens, slab.draw(u))
        answer[0].copy_(tokens)
        answer[1].copy_(raw_peaks)
        answer[2].copy_(peaks)
        if plan.wanting_logprobs:
            chosen = tokens.clamp(max=self._vocab_size - 1)[:, None]  # a failed row may point beyond
            answer[3].copy_(logits.gather(1, chosen)[:, 0] - raw_peaks)

    def _adjusted(self, logits: Tensor, plan: DevicePlan, step: DeviceStep, part: slice) -> Tensor:
        """A copy of `logits` [n, padded V] after mask, penalties and minimum length."""
        copy = self._slab.take(logits)
        if step.mask is not None:
            words = step.mask[part]
            forbidden = (words[:, :, None] >> self._bit).bitwise_and_(1).logical_not()
            width = 32 * words.shape[1]
            copy[:, :width].unflatten(1, (-1, 32)).masked_fill_(forbidden, float("-inf"))
        some = slice(bisect_left(plan.penalised, part.start), bisect_left(plan.penalised, part.stop))
        if some.start < some.stop and step.width:
            self._histories.penalise(
                copy,
                step.slots[some],
                first=step.penalised_cells[some],
                rates=step.rates[:, some],
                width=step.width,
            )
        some = slice(bisect_left(step.banned_rows, part.start), bisect_left(step.banned_rows, part.stop))
        if some.start < some.stop:
            copy.view(-1).index_fill_(0, step.banned_cells[some], float("-inf"))
        return copy


def _read(told: Doubles, wanting_logprobs: Sequence[int]) -> Sampled:
    """From fields [token, raw peak, adjusted peak, logit below the peak, log of the mass] of every row."""
    tokens = told[0].astype(np.int64)
    failures = {int(i): EngineFailed(BROKEN) for i in np.flatnonzero(~np.isfinite(told[1]))}
    for i in np.flatnonzero(~np.isfinite(told[2])):
        failures.setdefault(int(i), EngineFailed(NOTHING_ALLOWED))
    tokens[list(failures)] = -1
    if not wanting_logprobs:
        return Sampled(tokens, failures=failures)
    logprobs = np.full(len(tokens), np.nan, dtype=np.float32)
    good = [i for i in wanting_logprobs if i not in failures]
    logprobs[good] = told[3, good] - told[4, good]
    return Sampled(tokens, logprobs, failures)


def _slab_rows(vocab_size: int, lanes: int) -> int:
    return max(1, min(lanes, SLAB_TOKENS // padded(vocab_size)))


def _no_wait() -> None:
    """Host tensors are ready when the call returns."""
