"""Rows of the backend: what serving costs on top of the engine, step by step and stream by stream."""

import statistics
from collections.abc import Iterator
from functools import partial

import numpy as np
import numpy.typing as npt

from backend.generation import SamplingParams
from backend.no_cache import NoCache
from backend.sampling import NumpySampler
from backend.settings import ModelSettings
from engines import LaneId
from scripts.bench.decoder import Decoder, Heard, decoder
from scripts.bench.engine import decode_seconds
from scripts.bench.goals import STEP_LANES
from scripts.bench.harness import Measurement, Reading, alternate, median_of, timed
from scripts.bench.null_engine import NullEngine, TimedEngine
from scripts.bench.subject import Subject
from scripts.bench.swap import swap_tpot

_PROMPT = 64
_ANSWER = 96
_NULL_STEPS = 2000  # long enough that even 64 requests, parsed one by one, run together
_LONG_PROMPT = 1500
_SAMPLED_ROWS = 32


def measurements(subject: Subject) -> list[Measurement]:
    """All measurements of this room."""
    steps = tuple(f"backend.step_overhead_us.lanes{lanes}" for lanes in STEP_LANES)
    return [
        Measurement(("backend.stream1.vs_engine", "backend.stream8.vs_engine"), partial(_streams, subject)),
        Measurement(steps, partial(_step_overhead, subject)),
        Measurement(("backend.stall_chunks",), partial(_stall, subject)),
        Measurement(("backend.swap_tpot_p99",), partial(swap_tpot, subject)),
        Measurement(("sampler.real32_ms", "sampler.flat32_ms"), partial(_sampler, subject)),
    ]


def _streams(subject: Subject) -> Iterator[Reading]:
    from scripts.bench.served import TritonStreams, served  # late: the client is an extra

    with served(subject) as url, subject.engine(lanes=8, max_seq_len=512) as engine:
        for count, rounds in ((1, 7), (8, 7)):
            streams = TritonStreams(url, count)

            def through_triton(streams: TritonStreams = streams, count: int = count) -> float:
                prompts = [subject.prompt(_PROMPT) for _ in range(count)]
                return count * _ANSWER / streams.seconds(prompts, max_tokens=_ANSWER)

            def directly(count: int = count) -> float:
                prompts = [subject.prompt(_PROMPT) for _ in range(count)]
                steps = _ANSWER - 1  # the prefill gives the first token
                return count * _ANSWER / timed(lambda: decode_seconds(engine, prompts, steps=steps))

            try:
                paired = alternate(through_triton, directly, rounds=rounds)
            finally:
                streams.close()
            triton, direct = paired.medians
            shape = f"{_PROMPT} + {_ANSWER} tokens, prefill included"
            detail = f"{triton:.0f} tok/s against {direct:.0f} tok/s, {shape}"
            yield Reading(f"backend.stream{count}.vs_engine", paired.ratio, detail)


def _step_overhead(subject: Subject) -> Iterator[Reading]:
    release = subject.release()
    settings = ModelSettings(cache="off")
    for lanes in STEP_LANES:
        engine = NullEngine(lanes=lanes)

        def overhead(engine: NullEngine, asked: Decoder) -> float:
            engine.gaps.clear()
            prompt = np.arange(20, 28, dtype=np.int64)
            engine.all_asked.clear()
            answers = [asked.ask(prompt, max_tokens=_NULL_STEPS) for _ in range(engine.spec.lanes)]
            engine.all_asked.set()
            for heard in answers:
                heard.wait()
            return 1e6 * statistics.fmean(engine.gaps)

        with decoder(engine, NoCache(), release=release, settings=settings) as asked:
            value = median_of(partial(overhead, engine, asked), rounds=5)
        detail = f"mean of {len(engine.gaps)} steps, median of 5 runs; greedy, streaming, cache off"
        yield Reading(f"backend.step_overhead_us.lanes{lanes}", value, detail)


def _stall(subject: Subject) -> Iterator[Reading]:
    settings = ModelSettings(cache="off")
    chunks = []
    with subject.engine(lanes=8, max_seq_len=2048) as engine:
        timed_engine = TimedEngine(engine)
        with decoder(timed_engine, NoCache(), release=subject.release(), settings=settings) as asked:
            for _ in range(4):
                chunks.append(_longest_gap(subject, asked, timed_engine, settings.prefill_chunk_tokens))
    gap, chunk = (1e3 * statistics.median(values) for values in zip(*chunks, strict=True))
    size = settings.prefill_chunk_tokens
    detail = f"{gap:.0f} ms where a chunk of {size} tokens takes {chunk:.0f} ms, 4 streams running"
    yield Reading("backend.stall_chunks", statistics.median(gap / chunk for gap, chunk in chunks), detail)


def _longest_gap(subject: Subject, asked: Decoder, engine: TimedEngine, chunk: int) -> tuple[float, float]:
    """Seconds: the longest silence of a running stream during a long prefill, and what a chunk takes."""
    running = [asked.ask(subject.prompt(_PROMPT), max_tokens=400) for _ in range(4)]
    while any(len(heard.arrivals) < 4 and not heard.ended.is_set() for heard in running):
        running[-1].ended.wait(0.01)
    engine.prefills.clear()
    arriving = asked.ask(subject.prompt(_LONG_PROMPT), max_tokens=1).wait()
    until = arriving.arrivals[0]
    gap = statistics.median(longest_silence(heard, arriving.asked, until) for heard in running)
    seconds = [took for tokens, took in engine.prefills if tokens == chunk]
    for heard in running:
        heard.wait()
    return gap, statistics.median(seconds)


def longest_silence(heard: Heard, begin: float, end: float) -> float:
    """The longest time between two arrivals of a stream, from the last one before `begin` to `end`."""
    times = [at for at in heard.arrivals if at <= end]
    first = max((number for number, at in enumerate(times) if at <= begin), default=0)
    return max(later - earlier for earlier, later in zip(times[first:], times[first + 1 :], strict=False))


def _sampler(subject: Subject) -> Iterator[Reading]:
    real = _real_logits(subject)
    flat = np.random.default_rng(1).normal(0.0, 0.01, real.shape).astype(np.float32)
    for name, logits in (("real", real), ("flat", flat)):
        seconds = median_of(partial(_sample_seconds, logits), rounds=15, warmups=2)
        yield Reading(f"sampler.{name}32_ms", 1e3 * seconds, f"{logits.shape}, temperature 1, top-p 0.9")


def _real_logits(subject: Subject) -> npt.NDArray[np.float32]:
    rows = []
    with subject.engine(lanes=1, max_seq_len=512) as engine:
        for _ in range(_SAMPLED_ROWS):
            rows.append(engine.prefill(LaneId(0), subject.prompt(_PROMPT), 0).array[0].copy())
    return np.stack(rows)


def _sample_seconds(logits: npt.NDArray[np.float32]) -> float:
    sampler = NumpySampler(logits.shape[1])
    prompt = np.arange(_PROMPT, dtype=np.int64)
    params = [SamplingParams(temperature=1.0, top_p=0.9, seed=seed) for seed in range(len(logits))]
    rows = [sampler.row(param, prompt) for param in params]
    return timed(lambda: sampler.sample(logits, rows))
