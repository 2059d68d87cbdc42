"""Engines that show what the rest costs: one that computes nothing, one that takes times."""

import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from engines import Engine, EngineSpec, Geometry, LaneId, Logits

Tokens = npt.NDArray[np.int64]

VOCABULARY = 32
_FIRST_TEXT_TOKEN = 20  # lower ids are special tokens of the tokenizer
_ASKING_S = 30.0


class NullEngine:
    """Answers at once with the same logits; notes how long its caller stays away between decode calls."""

    def __init__(self, *, lanes: int, max_seq_len: int = 4096) -> None:
        self.spec = EngineSpec(
            model="null",
            release=1,
            digest="0" * 64,
            kv_identity=b"null engine kv  ",
            geometry=Geometry(
                layers=1, hidden=16, query_heads=1, kv_heads=1, head_dim=16, vocab_size=VOCABULARY
            ),
            kv_dtype=np.dtype(np.float32),
            block_tokens=32,
            lanes=lanes,
            max_seq_len=max_seq_len,
            positions=max_seq_len + 32,
            max_prefill_tokens=512,
            exact=True,
        )
        self._logits = np.zeros((lanes, VOCABULARY), np.float32)
        self._logits[np.arange(lanes), _FIRST_TEXT_TOKEN + np.arange(lanes) % 8] = 1.0
        self._left = 0.0
        self.all_asked = threading.Event()
        """Prefills wait for it, so that no request ends before the last one has come in."""
        self.gaps: list[float] = []
        """Seconds between the return of a decode over all lanes and the next call, when that is one too."""

    def prefill(self, lane: LaneId, tokens: Tokens, start: int) -> Logits:
        """See engines.Engine."""
        assert self.all_asked.wait(_ASKING_S), "the requests did not come in"
        self._left = 0.0
        return Logits(self._logits[:1])

    def decode(self, lanes: Sequence[LaneId], tokens: Tokens, positions: Tokens) -> Logits:
        """See engines.Engine."""
        called = time.perf_counter()
        full = len(lanes) == self.spec.lanes
        if full and self._left:
            self.gaps.append(called - self._left)
        logits = Logits(self._logits[: len(lanes)])
        self._left = time.perf_counter() if full else 0.0
        return logits

    def export_blocks(self, lane: LaneId, blocks: range, out: Sequence[npt.NDArray[np.uint8]]) -> None:
        """See engines.Engine."""

    def import_blocks(self, lane: LaneId, blocks: range, payloads: Sequence[npt.NDArray[np.uint8]]) -> None:
        """See engines.Engine."""

    def prewarm(self) -> Iterator[str]:
        """See engines.Engine."""
        return iter(())

    def adopt_kv(self, previous: Engine) -> None:
        """See engines.Engine."""

    def close(self) -> None:
        """See engines.Engine."""


class TimedEngine:
    """Passes everything on and notes the seconds of every prefill by its number of tokens."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.spec = engine.spec
        self.decode = engine.decode
        self.export_blocks = engine.export_blocks
        self.import_blocks = engine.import_blocks
        self.prewarm = engine.prewarm
        self.adopt_kv = engine.adopt_kv
        self.close = engine.close
        self.prefills: list[tuple[int, float]] = []

    def prefill(self, lane: LaneId, tokens: Tokens, start: int) -> Logits:
        """See engines.Engine."""
        began = time.perf_counter()
        logits = self._engine.prefill(lane, tokens, start)
        self.prefills.append((len(tokens), time.perf_counter() - began))
        return logits
