"""Engines broken in one way each, by a layer over a healthy one: what checks over the protocol must catch."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engines.contract import Engine, LaneId, Logits
from tests.gpu.on_host import OnHost

Ints = npt.NDArray[np.int64]
Payloads = Sequence[npt.NDArray[np.uint8]]


class WritesIdleLane(OnHost):
    """Every decode writes at position 0 of an idle lane between those it names."""

    def decode(self, lanes: Sequence[LaneId], tokens: Ints, positions: Ints) -> Logits:
        idle = [lane for lane in range(max(lanes)) if lane not in lanes]
        if idle:
            super().decode([LaneId(idle[0])], np.array([1]), np.array([0]))
        return super().decode(lanes, tokens, positions)


class WrongSlice(OnHost):
    """A prefill binds the lane after the one it names."""

    def prefill(self, lane: LaneId, tokens: Ints, start: int) -> Logits:
        return super().prefill(LaneId((lane + 1) % self.spec.lanes), tokens, start)


class SwappedRows(OnHost):
    """The logits of a batch come back in another order than asked for."""

    def decode(self, lanes: Sequence[LaneId], tokens: Ints, positions: Ints) -> Logits:
        return Logits(super().decode(lanes, tokens, positions).array[::-1].copy())


class ImportsOneLate(OnHost):
    """Blocks are imported one position too far."""

    def import_blocks(self, lane: LaneId, blocks: range, payloads: Payloads) -> None:
        shape, kind = self.spec.block_shape, self.spec.kv_dtype
        moved = [np.roll(p.view(kind).reshape(shape), 1, axis=3).reshape(-1).view(np.uint8) for p in payloads]
        super().import_blocks(lane, blocks, moved)


class ImportsNextBlock(OnHost):
    """Blocks are imported into the places after theirs."""

    def import_blocks(self, lane: LaneId, blocks: range, payloads: Payloads) -> None:
        whole = self.spec.max_seq_len // self.spec.block_tokens
        for block, payload in zip(blocks, payloads, strict=True):
            at = min(block + 1, whole - 1)
            super().import_blocks(lane, range(at, at + 1), [payload])


class ExportsEarly(OnHost):
    """An export does not wait for the step before it: it gives what was there when the last one began."""

    def decode(self, lanes: Sequence[LaneId], tokens: Ints, positions: Ints) -> Logits:
        whole = self.spec.max_seq_len // self.spec.block_tokens
        self._before = {lane: np.zeros((whole, self.spec.block_nbytes), np.uint8) for lane in lanes}
        for lane, payloads in self._before.items():
            super().export_blocks(lane, range(whole), list(payloads))
        return super().decode(lanes, tokens, positions)

    def export_blocks(self, lane: LaneId, blocks: range, out: Payloads) -> None:
        early = getattr(self, "_before", {}).pop(lane, None)
        if early is None:
            super().export_blocks(lane, blocks, out)
            return
        for buffer, payload in zip(out, early[blocks.start : blocks.stop], strict=True):
            buffer[:] = payload


class StaleGraph(OnHost):
    """A captured step of as many rows is played again with the tokens it was captured with."""

    def decode(self, lanes: Sequence[LaneId], tokens: Ints, positions: Ints) -> Logits:
        if not hasattr(self, "_captured"):
            self._captured: dict[int, Ints] = {}
        kept = self._captured.setdefault(len(tokens), tokens.copy())
        return super().decode(lanes, kept, positions)


class SplitBlind(OnHost):
    """A part of a prefill sees nothing of the parts before it."""

    def prefill(self, lane: LaneId, tokens: Ints, start: int) -> Logits:
        logits = super().prefill(lane, tokens, start)
        if start == 0:
            return logits
        block = np.zeros((-(-len(tokens) // self.spec.block_tokens), self.spec.block_nbytes), np.uint8)
        self.export_blocks(lane, range(len(block)), list(block))
        blind = super().prefill(lane, tokens, 0)
        self.import_blocks(lane, range(len(block)), list(block))
        return blind


class LosesLanes(OnHost):
    """A successor keeps its own empty lanes instead of taking over the live ones."""

    def adopt_kv(self, previous: Engine) -> None:
        pass
