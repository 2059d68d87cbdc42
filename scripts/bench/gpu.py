"""Rows of a GPU node: a step by window and lanes, what we add to TensorRT's, blocks over PCIe, hit and miss.

No GPU was at hand when this was written: on stand-ins the code runs, and no value was ever taken.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from backend.settings import ModelSettings
from engines import Engine, LaneId, Logits
from engines.cuda import open_device
from engines.tensorrt_plan import Plan
from engines.windows import rows_for, window_for
from scripts.bench.cache import block_format, fill, opened_cache, ttft
from scripts.bench.decoder import decoder
from scripts.bench.goals import GPU_MODELS, GPU_ROWS, GPU_WINDOWS
from scripts.bench.gpu_enqueue import own_plan, own_step
from scripts.bench.gpu_subject import GpuSubject, Model
from scripts.bench.harness import Measurement, Reading, alternate, median_of, timed

Wait = Callable[[Logits], object]
"""Returns when the step that writes these logits is done."""

_PROMPT = 1024
_HEADER = 128  # bytes of an arena's slot before the payload


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure: samples of a side; steps and imported bytes (several caches' worth) of each."""

    rounds: int = 9
    steps: int = 20
    imported: int = 256 << 20


def on_stream(logits: Logits) -> None:
    """Wait for the stream that writes them, without a copy to the host."""
    import torch

    stream: Any = torch.cuda.ExternalStream
    stream(logits.stream).synchronize()


@dataclass(frozen=True, slots=True)
class How:
    """What every measurement of this room needs beside its model."""

    subject: GpuSubject
    wait: Wait = on_stream
    effort: Effort = Effort()


def measurements(how: How) -> list[Measurement]:
    """All measurements of this room, in the order of the table."""
    grid = tuple(f"gpu.smollm2.decode_ms.w{window}.b{rows}" for window in GPU_WINDOWS for rows in GPU_ROWS)
    fused = ("gpu.smollm2.fused.prefill", "gpu.smollm2.fused.decode")
    every = [
        Measurement(grid, partial(_decode_grid, how)),
        Measurement(fused, partial(_fused, how.subject)),
        Measurement(("gpu.import.vs_pinned_copy", "gpu.restore.vs_pinned_copy"), partial(_imports, how)),
    ]
    for model in GPU_MODELS:
        own = tuple(f"gpu.{model}.decode{rows}.vs_enqueue" for rows in (1, 8))
        every.append(Measurement((f"gpu.{model}.ttft1024.hit_vs_miss",), partial(_hit, how, model)))
        every.append(Measurement(own, partial(_own_enqueue, how, model)))
    return every


def _decode_seconds(how: How, engine: Engine, *, rows: int, window: int) -> float:
    """Seconds of one decode step, launched and waited for, in the last position that `window` holds.

    What lies in the lanes is nothing to a kernel's time, so it is left as it is.
    """
    lanes = [LaneId(lane) for lane in range(rows)]
    last = min(window, engine.spec.max_seq_len) - 1
    positions = np.full(rows, last, np.int64)
    tokens = np.ones(rows, np.int64)

    def step() -> None:
        for _ in range(how.effort.steps):
            how.wait(engine.decode(lanes, tokens, positions))

    return timed(step) / how.effort.steps


def _decode_grid(how: How) -> Iterator[Reading]:
    """Milliseconds of a step over every window and number of lanes of the table."""
    rounds, steps = how.effort.rounds, how.effort.steps
    with how.subject.opened("smollm2") as opened:
        for window in GPU_WINDOWS:
            for rows in GPU_ROWS:
                side = partial(_decode_seconds, how, opened.engine, rows=rows, window=window)
                value = 1e3 * median_of(side, rounds=rounds, warmups=2)
                rate = f"{rows * 1e3 / value:.0f} tok/s, {how.subject.precision}"
                detail = f"{rate}, median of {rounds} × {steps} steps"
                yield Reading(f"gpu.smollm2.decode_ms.w{window}.b{rows}", value, detail)


def _fused(subject: GpuSubject) -> Iterator[Reading]:
    where = subject.release_folder("smollm2")
    for profile in subject.layers("smollm2").profiles:
        count = len(profile.fused) + len(profile.unfused)
        print(f"layers of profile {profile.profile}:", *profile.layers, sep="\n  ", flush=True)
        unfused = ", ".join(profile.unfused) or "none"
        detail = f"attentions not fused: {unfused}; {len(profile.layers)} layers, all in {where}/layers.json"
        yield Reading(f"gpu.smollm2.fused.{profile.profile}", len(profile.fused) / count, detail)


def _imports(how: How) -> Iterator[Reading]:
    """GB/s of blocks into a lane against one copy of as many page-locked bytes.

    Import: from page-locked slots, as an arena's are. Restore: from the host tier as a request does it,
    through memory of the cache's own, tags checked.
    """
    with how.subject.opened("smollm2") as opened:
        engine, spec = opened.engine, opened.engine.spec
        blocks = range(spec.max_seq_len // spec.block_tokens)
        with _pinned_slots(len(blocks), spec.block_nbytes) as (slots, copy_plainly):
            move = partial(engine.import_blocks, LaneId(0), blocks, slots)
            nbytes = len(blocks) * spec.block_nbytes
            yield _rate(how, "gpu.import.vs_pinned_copy", move, copy_plainly, nbytes=nbytes)
            with _leased(how, engine, blocks=len(blocks)) as restore:
                yield _rate(how, "gpu.restore.vs_pinned_copy", restore, copy_plainly, nbytes=nbytes)


def _rate(
    how: How, name: str, ours: Callable[[], None], plain: Callable[[], None], *, nbytes: int
) -> Reading:
    times = -(-how.effort.imported // nbytes)

    def gigabytes(move: Callable[[], None]) -> float:
        def work() -> None:
            for _ in range(times):
                move()

        return times * nbytes / timed(work) / 1e9

    paired = alternate(
        partial(gigabytes, ours), partial(gigabytes, plain), rounds=how.effort.rounds, warmups=2
    )
    moved, copied = paired.medians
    detail = f"{moved:.1f} GB/s of blocks against {copied:.1f} GB/s at once, {nbytes >> 20} MiB"
    return Reading(name, paired.ratio, detail)


@contextmanager
def _leased(how: How, engine: Engine, *, blocks: int) -> Iterator[Callable[[], None]]:
    """Restores a lane from a cache that holds it whole."""
    layout = block_format(engine.spec)
    with opened_cache(how.subject.folder, layout, host_bytes=1 << 30) as (cache, _, _):
        tokens = how.subject.prompt(engine, blocks * engine.spec.block_tokens)
        hashes = cache.hashes(tokens, namespace="bench")
        fill(cache, hashes, np.zeros(engine.spec.block_nbytes, np.uint8))
        lease = cache.acquire(hashes, deadline=None)

        def restore() -> None:
            usable = cache.restore(lease, first=0, sink=partial(engine.import_blocks, LaneId(0)))
            if usable != blocks:
                raise RuntimeError(f"{usable} of {blocks} blocks were restored")

        try:
            yield restore
        finally:
            lease.release()


@contextmanager
def _pinned_slots(
    count: int, nbytes: int
) -> Iterator[tuple[list[npt.NDArray[np.uint8]], Callable[[], None]]]:
    """Payloads that lie as in an arena's slots, and a plain copy of as many bytes to the device."""
    device = open_device(0)
    with device.current():
        stream = device.stream()
        slots = device.page_locked((count, _HEADER + nbytes), np.uint8)
        flat = device.page_locked((count * nbytes,), np.uint8)
        target = device.allocate(count * nbytes)

    def copy() -> None:
        with device.current():
            stream.upload(target.address, flat.array)
            stream.synchronise()

    try:
        yield [slot[_HEADER:] for slot in slots.array], copy
    finally:
        with device.current():
            target.free()
            flat.free()
            slots.free()
            stream.close()


def _hit(how: How, model: Model) -> Iterator[Reading]:
    """Time to the first token of a prompt whose blocks are in the host tier, against one never seen."""
    subject, settings = how.subject, ModelSettings(lane_ttl_s=0.0)
    with (
        subject.opened(model) as opened,
        opened_cache(subject.folder, block_format(opened.engine.spec), host_bytes=1 << 30) as (cache, _, _),
        decoder(opened.engine, cache, release=opened.release, settings=settings) as asked,
    ):
        prompt = subject.prompt(opened.engine, _PROMPT)

        def missed() -> float:
            nonlocal prompt
            prompt = subject.prompt(opened.engine, _PROMPT)
            return ttft(asked, prompt, cached=False)

        paired = alternate(missed, lambda: ttft(asked, prompt, cached=True), rounds=how.effort.rounds)
    miss, hit = (1e3 * seconds for seconds in paired.medians)
    detail = (
        f"{hit:.1f} ms against {miss:.1f} ms, host tier alone, {subject.precision}, {len(paired.a)} pairs"
    )
    yield Reading(f"gpu.{model}.ttft1024.hit_vs_miss", 1 / paired.ratio, detail)


def _own_enqueue(how: How, model: Model) -> Iterator[Reading]:
    with how.subject.opened(model) as opened:
        engine = opened.engine
        with own_plan(how.subject.release(model), engine.spec) as plan:
            for rows in (1, 8):
                yield _step_against_own(how, engine, plan, model=model, rows=rows)


def _step_against_own(how: How, engine: Engine, plan: Plan, *, model: Model, rows: int) -> Reading:
    """A decode step of ours against TensorRT's enqueue of the same shapes, both waited for."""
    spec, steps = engine.spec, how.effort.steps
    window = window_for(_PROMPT, spec.positions)
    with own_step(plan, spec, rows=rows_for(rows, spec.lanes), window=window) as own:

        def theirs() -> float:
            def work() -> None:
                for _ in range(steps):
                    own.run()

            return timed(work) / steps

        ours = partial(_decode_seconds, how, engine, rows=rows, window=window)
        paired = alternate(ours, theirs, rounds=how.effort.rounds, warmups=3)
    step, enqueue = (1e3 * seconds for seconds in paired.medians)
    detail = f"{step:.3f} ms a step against {enqueue:.3f} ms of TensorRT, {rows} lanes, window {window}"
    return Reading(f"gpu.{model}.decode{rows}.vs_enqueue", paired.ratio, detail)
