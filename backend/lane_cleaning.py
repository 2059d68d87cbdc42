"""Makes a lane fit for use again after a step left something that is no number in it.

An engine may read a whole window of a lane and give what is masked the weight 0: but 0 · NaN is NaN, and so
is 0 · ∞. Left as it is, such a lane would fail every sequence after this one.
"""

import logging

import numpy as np

from engines import DeviceLostError, Engine, EngineError, LaneId

log = logging.getLogger(__name__)


def clean_lane(engine: Engine, lane: LaneId, *, positions: int) -> None:
    """Write numbers to the first `positions` of a lane: zeros in whole blocks, KV of some tokens beyond.

    DeviceLostError; any other error of the engine is a log line, as the lane is no worse than before.
    """
    spec = engine.spec
    whole = spec.max_seq_len // spec.block_tokens
    blocks = range(min(-(-positions // spec.block_tokens), whole))
    zeros = np.zeros(spec.block_nbytes, np.uint8)
    try:
        engine.import_blocks(lane, blocks, [zeros] * len(blocks))
        start = whole * spec.block_tokens
        while start < min(positions, spec.max_seq_len):
            count = min(spec.max_seq_len - start, spec.max_prefill_tokens)
            engine.prefill(lane, np.zeros(count, np.int64), start)
            start += count
    except DeviceLostError:
        raise
    except EngineError as error:
        log.error("lane %d keeps what is no number and may fail again: %s", lane, error)
