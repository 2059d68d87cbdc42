"""What a GPU engine must do: functions over the Engine protocol; each returns a line of what it measured.

The tests of this folder run them on a GPU node, `tests/rig/test_gpu_checks.py` runs them in small without one
and proves with mutants that they can fail. `limit` is the error (see `torch_reference`) that two ways to the
same logits or KV may differ by, since TensorRT's kernels vary with shape; 0 asks for the same bits, as an
exact engine gives.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import numpy as np
import numpy.typing as npt

from backend.lane_cleaning import clean_lane
from engines.contract import Engine, LaneId, shares_kv
from engines.windows import row_counts, window_for, windows
from tests.engines import behaviours
from tests.engines.behaviours import cached, decode, export, prefill, some_tokens, whole_blocks
from tests.gpu.on_host import OnHost
from tests.gpu.torch_reference import Reference, error, errors

LENGTHS = (1, 30, 31, 32, 33)  # around a block of 32, with and without the step's own token
DROWNING = 1e4  # fits float16; one such value that is attended drowns any sum

Memory = Callable[[], Mapping[str, int]]
"""Bytes in use by name, such as device and host."""


# -- (1) --


def logits_match_torch(engine: Engine, reference: Reference) -> str:
    """One token after each length of cache, then all tokens one by one, poison beyond what was written.

    The longest cache is what leaves room for one token: with it S − 1 positions are attended to.
    """
    engine, spec, tokens = OnHost(engine), engine.spec, reference.tokens
    assert len(tokens) == spec.max_seq_len == spec.positions - 1, "the sequence fills a lane but for scratch"
    worst = 0.0
    for lane in sorted({0, spec.lanes - 1}):
        for length in (*LENGTHS, spec.max_seq_len - 1):
            poison(engine, lane)
            prefill(engine, lane, tokens[:length])
            found = decode(engine, {lane: (int(tokens[length]), length)})[lane]
            off = error(found, reference.logits[length])
            assert off <= reference.limit, (
                f"T = 1 after {length} cached in lane {lane}: error {off:.1e}, allowed {reference.limit:.1e}"
            )
            worst = max(worst, off)
    poison(engine, 0)
    steps = [decode(engine, {0: (int(token), position)})[0] for position, token in enumerate(tokens)]
    off_at = errors(np.stack(steps), reference.logits)
    where = int(np.argmax(np.where(np.isnan(off_at), np.inf, off_at)))
    assert off_at[where] <= reference.limit, (
        f"token by token, {where} cached: error {off_at[where]:.1e}, allowed {reference.limit:.1e}"
    )
    median = float(np.median(off_at))
    assert median <= reference.median_limit, (
        f"token by token, median: error {median:.1e}, allowed {reference.median_limit:.1e}"
    )
    return (
        f"error after prefill {worst:.1e}, token by token {off_at[where]:.1e} at worst (allowed "
        f"{reference.limit:.1e}), {median:.1e} in the median (allowed {reference.median_limit:.1e})"
    )


def poison(engine: Engine, lane: int) -> None:
    """Spoil a whole lane: another sequence everywhere, and in whole blocks keys of 0 with drowning values.

    A key of 0 scores 0, in the midst of real scores, so that it has weight as soon as the mask lets it
    through, and never overflows float16, which a masked score must not.
    """
    spec = engine.spec
    prefill(engine, lane, some_tokens(engine, spec.max_seq_len, seed=97))
    payload = np.zeros(spec.block_shape, spec.kv_dtype)
    payload[:, 1] = DROWNING
    blocks = range(whole_blocks(engine))
    engine.import_blocks(LaneId(lane), blocks, [payload.reshape(-1).view(np.uint8)] * len(blocks))


# -- (2) --


def split_equals_whole(engine: Engine, *, limit: float) -> str:
    """Logits and KV of a prompt prefilled in parts, against one prefilled in the largest parts."""
    engine = OnHost(engine)
    count = min(200, engine.spec.max_seq_len, engine.spec.max_prefill_tokens)
    tokens = some_tokens(engine, count)
    whole = prefill(engine, 0, tokens)
    kept = cached(engine, 0, count)
    random = np.random.default_rng(3)
    splits = [[1] * count, [2], [3, 3, 1, 1, 2], [31, 1], [32], [33, 31], [count - 1]]
    splits += [[int(size) for size in random.integers(1, 70, 40)] for _ in range(4)]
    worst = worst_kv = 0.0
    for cuts in splits:
        shown = f"parts {cuts[:6]}{' …' if len(cuts) > 6 else ''}"
        poison(engine, 1)
        worst = max(worst, _near(prefill(engine, 1, tokens, cuts=cuts), whole, limit, f"logits for {shown}"))
        worst_kv = max(worst_kv, _near(cached(engine, 1, count), kept, limit, f"KV for {shown}"))
    return f"logits differ by {worst:.1e}, KV by {worst_kv:.1e} (allowed {limit:.1e})"


def _near(found: npt.NDArray, expected: npt.NDArray, limit: float, what: str) -> float:
    off = error(found, expected)
    assert off <= limit, f"{what}: error {off:.1e}, allowed {limit:.1e}"
    return off


# -- (3) --


def idle_lanes_keep_their_bytes(engine: Engine, *, steps: int) -> str:
    """Random prefills and decodes leave every byte of every lane they do not name."""
    behaviours.idle_lanes_stay(OnHost(engine), steps=steps)
    return f"{steps} random steps, every other lane bit for bit as before"


# -- (4) --


def lane_slice_equals_batch_row(engine: Engine, *, limit: float) -> str:
    """A step of one token bound at lane k alone, against row k of a batch in which every lane is longer."""
    engine = OnHost(engine)
    lanes = range(engine.spec.lanes)
    block = engine.spec.block_tokens
    lengths = {lane: 5 + lane * (block + 3) for lane in lanes}
    sequences = {lane: some_tokens(engine, lengths[lane] + 1, seed=40 + lane) for lane in lanes}
    first = {}
    for lane in lanes:  # every sequence in lane 0, where no offset can be wrong
        prefill(engine, 0, sequences[lane][:-1])
        first[lane] = cached(engine, 0, lengths[lane])
    for lane in lanes:
        poison(engine, lane)
    for lane in lanes:
        prefill(engine, lane, sequences[lane][:-1])
    worst = max(_near(cached(engine, k, lengths[k]), first[k], limit, f"KV of lane {k}") for k in lanes)
    step = {lane: (int(sequences[lane][-1]), lengths[lane]) for lane in lanes}
    in_batch = decode(engine, step)
    written = {lane: cached(engine, lane, lengths[lane] + 1) for lane in lanes}
    shuffled = decode(engine, {lane: step[lane] for lane in reversed(lanes)})
    for lane in lanes:
        alone = prefill(engine, lane, sequences[lane][-1:], start=lengths[lane])
        rows = [in_batch[lane], shuffled[lane], decode(engine, {lane: step[lane]})[lane]]
        off = [_near(row, alone, limit, f"row {lane}") for row in rows]
        kv = _near(cached(engine, lane, lengths[lane] + 1), written[lane], limit, f"KV of row {lane}")
        worst = max(worst, kv, *off)
    return f"{len(lanes)} lanes, logits and KV differ by {worst:.1e} (allowed {limit:.1e})"


def nan_lanes_answer_again(engine: Engine, *, limit: float) -> str:
    """A lane full of NaN, as a broken step may leave one, answers like any other once it was cleaned."""
    engine, spec = OnHost(engine), engine.spec
    blocks = range(whole_blocks(engine))
    nan = np.full(spec.block_shape, np.nan, spec.kv_dtype).reshape(-1).view(np.uint8)
    short, long = (some_tokens(engine, count, seed=4) for count in (20, spec.max_seq_len))
    expected = [prefill(engine, 0, tokens) for tokens in (short, long)]
    engine.import_blocks(LaneId(1), blocks, [nan] * len(blocks))
    tail = len(blocks) * spec.block_tokens
    if tail < spec.max_seq_len:
        prefill(engine, 1, long[tail:], start=tail)
    uncleaned = np.isnan(prefill(engine, 1, short)).any()
    clean_lane(engine, LaneId(1), positions=spec.max_seq_len)
    worst = 0.0
    for tokens, answer in zip((short, long), expected, strict=True):
        worst = max(worst, _near(prefill(engine, 1, tokens), answer, limit, f"{len(tokens)} tokens, cleaned"))
    before = "would have failed" if uncleaned else "was well without that, too"
    return f"a cleaned lane differs by {worst:.1e} (allowed {limit:.1e}); it {before}"


# -- (5) --


def blocks_round_trip(engine: Engine, *, load: AbstractContextManager[object], limit: float) -> str:
    """Blocks leave and come back bit for bit while `load` keeps another stream busy, and in order with steps.

    A step is launched and not waited for; the export right after it must hold what the step writes, and the
    import right after it must neither disturb it nor be late for the next step.
    """
    host, block = OnHost(engine), engine.spec.block_tokens
    last, after = 2 * block - 1, 2 * block
    tokens = some_tokens(engine, last, seed=61)
    with load:
        behaviours.blocks_round_trip(host)
        for attempt in range(20):
            prefill(host, 0, tokens)
            prefill(host, 2, some_tokens(engine, after, seed=70 + attempt))
            stale = export(engine, 0, range(2))
            step = np.array([1 + attempt % 2]), np.array([last])  # another token than in the attempt before
            engine.decode([LaneId(0)], *step)
            early = export(engine, 0, range(2))
            engine.decode([LaneId(0)], *step)
            engine.import_blocks(LaneId(2), range(2), list(early))
            answers = decode(host, {0: (1, after), 2: (1, after)})
            assert not np.array_equal(early, stale), "an export did not wait for the step before it"
            assert np.array_equal(export(engine, 0, range(2)), early), "an export holds half a step"
            assert np.array_equal(export(engine, 2, range(2)), early), "an import changed bytes"
            _near(answers[2], answers[0], limit, "a step right after an import")
    return "every range and kind of buffer, bit for bit; 20 times in order with steps not waited for"


# -- (6) --


def graphs_change_nothing(captured: Engine, plain: Engine, *, limit: float, visits: int = 4) -> str:
    """The same steps with CUDA graphs and without, each shape again and again after others have run.

    A shape is a number of rows and a window, as the engine rounds them; between two visits to one, others
    run, prefills bind other addresses, and tokens, positions and KV change.
    """
    engines = OnHost(captured), OnHost(plain)
    spec, random = captured.spec, np.random.default_rng(9)
    sizes = [(rows, window) for rows in row_counts(spec.lanes) for window in windows(spec.positions)]
    lengths = dict.fromkeys(range(spec.lanes), 0)
    worst = 0.0
    for visit, at in enumerate(random.permutation(len(sizes) * visits)):
        rows, window = sizes[at % len(sizes)]
        most = min(window, spec.max_seq_len) - 2  # room for two steps in this window
        for lane in range(rows):
            short = lane == 0 and window_for(lengths[0] + 1, spec.positions) < window  # others may be
            if 0 < lengths[lane] <= most and not short:
                continue
            lengths[lane] = most - int(random.integers(0, 9))
            tokens = some_tokens(captured, lengths[lane], seed=visit)
            one, other = (prefill(engine, lane, tokens) for engine in engines)
            worst = max(worst, _near(one, other, limit, f"visit {visit}, prefill of lane {lane}"))
        for _ in range(2):
            going = [lane for lane in range(rows) if lane in (0, rows - 1) or random.random() < 0.7]
            ids = random.integers(1, spec.geometry.vocab_size, len(going)).tolist()
            step = {lane: (token, lengths[lane]) for lane, token in zip(going, ids, strict=True)}
            ones, others = (decode(engine, step) for engine in engines)
            for lane in going:
                what = f"visit {visit}, {rows} rows in a window of {window}, row {lane}"
                worst = max(worst, _near(ones[lane], others[lane], limit, what))
                lengths[lane] += 1
    for lane, length in lengths.items():
        seen = min(length, whole_blocks(captured) * spec.block_tokens)
        one, other = (cached(engine, lane, seen) for engine in engines)
        worst = max(worst, _near(one, other, limit, f"KV of lane {lane} in the end"))
    shown = f"{len(sizes)} shapes, {visits} visits each"
    return f"{shown}: logits and KV differ by {worst:.1e} (allowed {limit:.1e})"


# -- (9) --


def swaps_leave_memory_flat(
    open_next: Callable[[int, Engine | None], Engine],
    memory: Memory,
    *,
    slack: Mapping[str, int],
    limit: float,
    swaps: int = 10,
) -> str:
    """Ten successors in a row, each opened beside the one that serves: no byte more is held after the last.

    `open_next(n, serving)` opens the n-th engine; where it shares KV it takes the lanes over, and the live
    sequence goes on as if nothing had happened. Memory is compared from the fourth engine on: libraries keep
    pools of their own after their first uses.
    """
    serving = open_next(0, None)
    tokens = some_tokens(serving, 64, seed=83)
    live = prefill(OnHost(serving), 1, tokens)
    readings: list[Mapping[str, int]] = []
    taken_over = 0
    try:
        for number in range(1, swaps + 1):
            successor = open_next(number, serving)
            continues = shares_kv(successor.spec, serving.spec)
            if continues:
                successor.adopt_kv(serving)
                taken_over += 1
            serving.close()
            serving = successor
            if continues:
                again = prefill(OnHost(serving), 1, tokens[-2:], start=len(tokens) - 2)
                _near(again, live, limit, f"the live sequence after swap {number}")
            live = prefill(OnHost(serving), 1, tokens)
            readings.append(dict(memory()))
    finally:
        serving.close()
    assert taken_over, "no engine shared KV with the one before it"
    for name, allowed in slack.items():
        grown = _growth([reading[name] for reading in readings])
        assert grown <= allowed, f"{name} memory grew by {grown} bytes over {swaps} swaps, allowed {allowed}"
    grown_by = {name: _growth([reading[name] for reading in readings]) for name in slack}
    return f"{swaps} swaps, {taken_over} with live lanes, memory grew by {grown_by} bytes"


def _growth(values: Sequence[int]) -> int:
    """By how much the last swaps hold more than any of the first four ever did."""
    return max(values[4:]) - max(values[:4])
