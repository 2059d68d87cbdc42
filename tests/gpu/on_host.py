"""An engine whose logits are copied to the host at once, so that checks read them as arrays."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from engines.contract import Engine, EngineSpec, LaneId, Logits


class OnHost:
    """Everything as the engine behind it does it; a copy of the logits also outlives the next step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @property
    def spec(self) -> EngineSpec:
        return self.engine.spec

    def prefill(self, lane: LaneId, tokens: npt.NDArray[np.int64], start: int) -> Logits:
        return _copied(self.engine.prefill(lane, tokens, start))

    def decode(
        self, lanes: Sequence[LaneId], tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> Logits:
        return _copied(self.engine.decode(lanes, tokens, positions))

    def export_blocks(self, lane: LaneId, blocks: range, out: Sequence[npt.NDArray[np.uint8]]) -> None:
        self.engine.export_blocks(lane, blocks, out)

    def import_blocks(self, lane: LaneId, blocks: range, payloads: Sequence[npt.NDArray[np.uint8]]) -> None:
        self.engine.import_blocks(lane, blocks, payloads)

    def prewarm(self) -> Iterator[str]:
        return self.engine.prewarm()

    def adopt_kv(self, previous: Engine) -> None:
        self.engine.adopt_kv(previous.engine if isinstance(previous, OnHost) else previous)

    def close(self) -> None:
        self.engine.close()


def _copied(logits: Logits) -> Logits:
    return Logits(np.array(np.asarray(logits.array)))
