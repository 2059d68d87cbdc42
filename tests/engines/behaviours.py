"""What every engine must do, as checks over the protocol alone. A broken engine fails an assert.

Logits and KV of two ways to the same tokens have the same bits where the engine promises it (`spec.exact`),
and differ by rounding elsewhere. What is copied always has the same bits.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from engines.contract import Engine, LaneId

Tokens = npt.NDArray[np.int64]

POISON = np.float32(1e4)
ROUNDING = 0.03  # of the largest value: two paths through a few half-precision layers differ by less


def same(engine: Engine, one: npt.NDArray, other: npt.NDArray) -> bool:
    """Equal, as far as the engine promises it."""
    if engine.spec.exact:
        return np.array_equal(one, other)
    apart = np.abs(one.astype(np.float64) - other).max()
    return bool(apart <= ROUNDING * np.abs(other).max())  # a NaN is not


def some_tokens(engine: Engine, count: int, *, seed: int = 0) -> Tokens:
    return np.random.default_rng(seed).integers(1, engine.spec.geometry.vocab_size, count)


def prefill(
    engine: Engine, lane: int, tokens: Tokens, *, cuts: Sequence[int] = (), start: int = 0
) -> npt.NDArray:
    """Prefill in parts of the given sizes (the rest as large as allowed); logits [V] of the last token."""
    position, logits = start, None
    sizes = list(cuts)
    while position < start + len(tokens):
        left = start + len(tokens) - position
        most = engine.spec.max_prefill_tokens
        size = min(sizes.pop(0) if sizes else most, most, left)
        part = tokens[position - start : position - start + size]
        logits = engine.prefill(LaneId(lane), part, position).array[0].copy()
        position += size
    assert logits is not None
    return logits


def decode(engine: Engine, rows: dict[int, tuple[int, int]]) -> dict[int, npt.NDArray]:
    """One step of {lane: (token, position)}; {lane: logits}."""
    lanes = [LaneId(lane) for lane in rows]
    tokens = np.array([token for token, _ in rows.values()], dtype=np.int64)
    positions = np.array([position for _, position in rows.values()], dtype=np.int64)
    array = engine.decode(lanes, tokens, positions).array
    assert array.shape == (len(rows), engine.spec.geometry.vocab_size)
    assert array.dtype == np.float32
    return {lane: array[row].copy() for row, lane in enumerate(rows)}


def whole_blocks(engine: Engine) -> int:
    return engine.spec.max_seq_len // engine.spec.block_tokens


def export(engine: Engine, lane: int, blocks: range) -> npt.NDArray[np.uint8]:
    """[blocks, payload bytes]"""
    out = np.zeros((len(blocks), engine.spec.block_nbytes), dtype=np.uint8)
    engine.export_blocks(LaneId(lane), blocks, list(out))
    return out


def cached(engine: Engine, lane: int, tokens: int) -> npt.NDArray[np.float32]:
    """The KV of the first `tokens` positions: [layers, k|v, heads, tokens, dim]."""
    spec = engine.spec
    blocks = -(-tokens // spec.block_tokens)
    payloads = export(engine, lane, range(blocks)).view(spec.kv_dtype).reshape(blocks, *spec.block_shape)
    joined = np.concatenate(list(payloads), axis=3)
    return joined[:, :, :, :tokens]


def poison(engine: Engine, lane: int) -> None:
    """Fill every whole block of a lane with a value that would drown any sum it entered."""
    payload = np.full(engine.spec.block_nbytes // 4, POISON, dtype=np.float32).view(np.uint8)
    blocks = range(whole_blocks(engine))
    engine.import_blocks(LaneId(lane), blocks, [payload.copy() for _ in blocks])


def split_prefill_equals_whole(engine: Engine) -> None:
    tokens = some_tokens(engine, 200)
    random = np.random.default_rng(3)
    one_by_one = prefill(engine, 0, tokens, cuts=[1] * 200)
    kept = cached(engine, 0, 200)
    block = 2 * engine.spec.geometry.head_dim  # attention kernels work on this many queries at a time
    splits = [[], [block + 1], [block - 1, block], [2], [3, 3, 1, 1, 2], [199], [127, 1]]
    splits += [random.integers(1, 70, 40).tolist() for _ in range(6)]
    for cuts in splits:
        logits = prefill(engine, 1, tokens, cuts=[int(cut) for cut in cuts])
        assert same(engine, logits, one_by_one), f"logits differ for parts {cuts}"
        assert same(engine, cached(engine, 1, 200), kept), f"KV differs for parts {cuts}"


def decode_equals_prefill(engine: Engine) -> None:
    tokens = some_tokens(engine, 40, seed=1)
    prefill(engine, 0, tokens[:10])
    for position in range(10, 40):
        stepped = decode(engine, {0: (int(tokens[position]), position)})[0]
        whole = prefill(engine, 1, tokens[: position + 1])
        assert same(engine, stepped, whole), f"position {position}"
    assert same(engine, cached(engine, 0, 40), cached(engine, 1, 40))


def batch_equals_lone(engine: Engine) -> None:
    """Sequences of different lengths, in any order of lanes, with gaps between them."""
    lengths = {0: 5, 1: 33, 2: 70, 3: 16}
    sequences = {lane: some_tokens(engine, count + 20, seed=lane) for lane, count in lengths.items()}
    alone = {}
    for lane, count in lengths.items():
        prefill(engine, 0, sequences[lane][:count])
        steps = [decode(engine, {0: (int(sequences[lane][count + i]), count + i)})[0] for i in range(20)]
        alone[lane] = (steps, cached(engine, 0, count + 20))
    for lane, count in lengths.items():
        prefill(engine, lane, sequences[lane][:count])
    random = np.random.default_rng(5)
    done = dict.fromkeys(lengths, 0)
    while any(count < 20 for count in done.values()):
        going = [lane for lane in lengths if done[lane] < 20]
        chosen = random.permutation(going)[: random.integers(1, len(going) + 1)]
        rows = {
            int(ln): (int(sequences[ln][lengths[ln] + done[ln]]), lengths[ln] + done[ln]) for ln in chosen
        }
        for lane, logits in decode(engine, rows).items():
            assert same(engine, logits, alone[lane][0][done[lane]]), (
                f"lane {lane} step {done[lane]} of {rows}"
            )
            done[lane] += 1
    for lane, count in lengths.items():
        assert same(engine, cached(engine, lane, count + 20), alone[lane][1])


def idle_lanes_stay(engine: Engine, *, steps: int) -> None:
    """Random prefills and decodes change nothing in lanes they do not name, nor before what they write."""
    spec, random = engine.spec, np.random.default_rng(7)
    blocks = range(whole_blocks(engine))
    for lane in range(spec.lanes):
        prefill(engine, lane, some_tokens(engine, 60, seed=lane))
    lengths = dict.fromkeys(range(spec.lanes), 60)
    before = {lane: export(engine, lane, blocks) for lane in lengths}
    for step in range(steps):
        starts = _random_step(engine, lengths, random)
        for lane in lengths:
            after = export(engine, lane, blocks)
            if lane not in starts:
                assert np.array_equal(after, before[lane]), (
                    f"step {step} of {list(starts)} changed idle lane {lane}"
                )
            else:
                kept = starts[lane] // spec.block_tokens
                assert np.array_equal(after[:kept], before[lane][:kept]), (
                    f"step {step} changed the past of {lane}"
                )
            before[lane] = after


def _random_step(engine: Engine, lengths: dict[int, int], random: np.random.Generator) -> dict[int, int]:
    """Run one step; {lane: first position written}."""
    spec = engine.spec
    for lane, length in lengths.items():
        if length > spec.max_seq_len - 12:
            lengths[lane] = int(random.integers(0, 50))  # a new sequence in a used lane
    if random.random() < 0.3:
        lane = int(random.integers(spec.lanes))
        size = int(random.integers(1, 10))
        prefill(engine, lane, some_tokens(engine, size, seed=size), start=lengths[lane])
        lengths[lane] += size
        return {lane: lengths[lane] - size}
    chosen = random.permutation(spec.lanes)[: random.integers(1, spec.lanes)]
    rows = {
        int(lane): (int(random.integers(spec.geometry.vocab_size)), lengths[int(lane)]) for lane in chosen
    }
    decode(engine, rows)
    for lane in rows:
        lengths[lane] += 1
    return {lane: position for lane, (_, position) in rows.items()}


def poison_is_not_read(engine: Engine) -> None:
    tokens = some_tokens(engine, 90, seed=11)
    clean = [prefill(engine, 0, tokens[:77], cuts=[30])]
    clean += [decode(engine, {0: (int(tokens[p]), p)})[0] for p in range(77, 90)]
    poison(engine, 1)
    poison(engine, 2)
    dirty = [prefill(engine, 2, tokens[:77], cuts=[30])]
    dirty += [decode(engine, {2: (int(tokens[p]), p)})[2] for p in range(77, 90)]
    assert all(same(engine, a, b) for a, b in zip(clean, dirty, strict=True))


def lane_is_reused(engine: Engine) -> None:
    """A short sequence in a lane that held a longer one."""
    fresh = prefill(engine, 0, some_tokens(engine, 21, seed=13))
    prefill(engine, 1, some_tokens(engine, engine.spec.max_seq_len, seed=14))
    assert same(engine, prefill(engine, 1, some_tokens(engine, 21, seed=13)), fresh)


def blocks_round_trip(engine: Engine) -> None:
    """Any range of blocks leaves and comes back bit for bit, whatever the buffers lie like."""
    random = np.random.default_rng(17)
    total, size = whole_blocks(engine), engine.spec.block_nbytes
    for lane in (0, 2):
        prefill(engine, lane, some_tokens(engine, total * engine.spec.block_tokens, seed=lane))
    source = export(engine, 0, range(total))
    assert len(np.unique(source[:, :64], axis=0)) == total, "blocks are not distinct"
    for _ in range(25):
        first = int(random.integers(total))
        blocks = range(first, int(random.integers(first, total)) + 1)
        for out in _buffers(len(blocks), size, random):
            engine.export_blocks(LaneId(0), blocks, out)
            assert all(np.array_equal(out[i], source[block]) for i, block in enumerate(blocks))
            others = export(engine, 2, range(total))
            engine.import_blocks(LaneId(2), blocks, out)
            others[blocks.start : blocks.stop] = source[blocks.start : blocks.stop]
            assert np.array_equal(export(engine, 2, range(total)), others)
            prefill(engine, 2, some_tokens(engine, 8, seed=23))
    assert np.array_equal(export(engine, 0, range(total)), source)


def _buffers(count: int, size: int, random: np.random.Generator) -> list[list[npt.NDArray[np.uint8]]]:
    """Buffers side by side, at a distance, backwards, and scattered."""
    spaced = np.zeros((count, size + 384), dtype=np.uint8)
    loose = np.zeros((2 * count, size + 128), dtype=np.uint8)
    scattered = [loose[int(i), 128 : 128 + size] for i in random.permutation(2 * count)[:count]]
    return [
        list(np.zeros((count, size), dtype=np.uint8)),
        [row[128 : 128 + size] for row in spaced],
        [row[128 : 128 + size] for row in spaced[::-1]],
        scattered,
    ]


def resumed_equals_computed(engine: Engine, other: Engine | None = None) -> None:
    """Blocks made by one engine continue in another lane (of `other`), with the same bits."""
    other = other or engine
    bt = engine.spec.block_tokens
    tokens = some_tokens(engine, 4 * bt + 5, seed=19)
    computed = prefill(engine, 0, tokens)
    for blocks in (1, 3, 4):
        payloads = export(engine, 0, range(blocks))
        poison(other, 1)
        other.import_blocks(LaneId(1), range(blocks), list(payloads))
        assert same(engine, prefill(other, 1, tokens[blocks * bt :], start=blocks * bt), computed)
    prefill(engine, 0, tokens[: 4 * bt])
    again = decode(engine, {0: (int(tokens[4 * bt]), 4 * bt)})[0]
    other.import_blocks(LaneId(1), range(4), list(export(engine, 0, range(4))))
    # a prompt that is cached whole computes its last two tokens again, over the same bits
    last_two = prefill(other, 1, tokens[4 * bt - 1 : 4 * bt + 1], start=4 * bt - 1)
    assert same(engine, last_two, again)


def last_position_is_usable(engine: Engine) -> None:
    """Writing up to max_seq_len − 1, by prefill and by decode, stays inside the lane."""
    spec = engine.spec
    tokens = some_tokens(engine, spec.max_seq_len, seed=29)
    blocks = range(whole_blocks(engine))
    for lane in (0, 1, 2):
        prefill(engine, lane, tokens)
    before = {lane: export(engine, lane, blocks) for lane in (0, 2)}
    written = cached(engine, 1, spec.max_seq_len // spec.block_tokens * spec.block_tokens)
    last = spec.max_seq_len - 1
    by_decode = decode(engine, {1: (int(tokens[last]), last)})[1]
    by_prefill = prefill(engine, 1, tokens[last:], start=last)
    odd_part = prefill(engine, 1, tokens[last - 2 :], start=last - 2)
    assert same(engine, by_decode, by_prefill)
    assert same(engine, by_decode, odd_part)
    again = cached(engine, 1, written.shape[3])
    assert np.array_equal(again[:, :, :, : last - 2], written[:, :, :, : last - 2]), "the past of lane 1"
    assert same(engine, again, written)
    for lane in (0, 2):
        assert np.array_equal(export(engine, lane, blocks), before[lane]), f"lane {lane}"


def refuses(call: Callable[[], object]) -> bool:
    """Whether the engine asserts, as it must before a launch that would write outside a lane."""
    try:
        call()
    except AssertionError:
        return True
    return False


def out_of_range_asserts(engine: Engine) -> None:
    spec = engine.spec
    ids = some_tokens(engine, 4)
    room = np.zeros(spec.block_nbytes, dtype=np.uint8)
    lane, positions = LaneId(0), np.array([3], dtype=np.int64)
    wrong: dict[str, Callable[[], object]] = {
        "prefill past the end": lambda: engine.prefill(lane, ids, spec.max_seq_len - 3),
        "prefill before the start": lambda: engine.prefill(lane, ids, -1),
        "prefill of nothing": lambda: engine.prefill(lane, ids[:0], 0),
        "prefill too long": lambda: engine.prefill(lane, some_tokens(engine, spec.max_prefill_tokens + 1), 0),
        "prefill of an unknown lane": lambda: engine.prefill(LaneId(spec.lanes), ids, 0),
        "token outside the vocabulary": lambda: engine.prefill(lane, ids + spec.geometry.vocab_size, 0),
        "decode past the end": lambda: engine.decode([lane], ids[:1], np.array([spec.max_seq_len])),
        "decode before the start": lambda: engine.decode([lane], ids[:1], np.array([-1])),
        "decode of an unknown lane": lambda: engine.decode([LaneId(-1)], ids[:1], positions),
        "decode of a lane twice": lambda: engine.decode([lane, lane], ids[:2], np.array([3, 4])),
        "decode of nothing": lambda: engine.decode([], ids[:0], ids[:0]),
        "export past the end": lambda: engine.export_blocks(lane, _beyond(engine), [room]),
        "import past the end": lambda: engine.import_blocks(lane, _beyond(engine), [room]),
        "import of a short payload": lambda: engine.import_blocks(lane, range(1), [room[:-1]]),
        "export into too few buffers": lambda: engine.export_blocks(lane, range(2), [room]),
    }
    accepted = [name for name, call in wrong.items() if not refuses(call)]
    assert accepted == []


def _beyond(engine: Engine) -> range:
    return range(whole_blocks(engine), whole_blocks(engine) + 1)
