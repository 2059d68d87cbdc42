"""The graph that TensorRT gets, run by ONNX Runtime behind the Engine protocol: half precision without a GPU.

No part of the TensorRT engine's own code runs here; what it shows is that checks made for half precision pass
on the right graph and fail on a wrong one.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from engines.contract import Engine, EngineSpec, LaneId, Logits
from engines.decoder import Decoder
from engines.graph_tensorrt import build_graph
from engines.onnx_emit import EmittedGraph
from tests.engines.graph_runs import IDLE, GraphRun, open_session

LANES, BLOCK, POSITIONS, CHUNK = 4, 32, 384, 128


class GraphEngine:
    """Four lanes of 384 positions in float16; not exact, as TensorRT is not."""

    def __init__(
        self, decoder: Decoder, *, change: Callable[[EmittedGraph], EmittedGraph] = lambda graph: graph
    ) -> None:
        graph = change(build_graph(decoder, positions=POSITIONS, precision="float16"))
        geometry = decoder.config.geometry
        self.run = GraphRun(
            open_session(graph), geometry, lanes=LANES, positions=POSITIONS, kv_dtype=np.float16, poison=0.0
        )
        self.spec = EngineSpec(
            model="graph", release=1, digest="", kv_identity=b"float16 graph   ", geometry=geometry,
            kv_dtype=np.dtype(np.float16), block_tokens=BLOCK, lanes=LANES, max_seq_len=POSITIONS - 1,
            positions=POSITIONS, max_prefill_tokens=CHUNK, exact=False,
        )  # fmt: skip

    def prefill(self, lane: LaneId, tokens: npt.NDArray[np.int64], start: int) -> Logits:
        return Logits(self.run.step([tokens.tolist()], [start], first_lane=lane)[:, -1])

    def decode(
        self, lanes: Sequence[LaneId], tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> Logits:
        rows = [[0] for _ in range(max(lanes) + 1)]
        starts = [IDLE] * len(rows)
        for lane, token, position in zip(lanes, tokens, positions, strict=True):
            rows[lane], starts[lane] = [int(token)], int(position)
        return Logits(self.run.step(rows, starts)[list(lanes), 0])

    def export_blocks(self, lane: LaneId, blocks: range, out: Sequence[npt.NDArray[np.uint8]]) -> None:
        for block, buffer in zip(blocks, out, strict=True):
            buffer[:] = np.ascontiguousarray(self._block(lane, block)).reshape(-1).view(np.uint8)

    def import_blocks(self, lane: LaneId, blocks: range, payloads: Sequence[npt.NDArray[np.uint8]]) -> None:
        for block, payload in zip(blocks, payloads, strict=True):
            self._block(lane, block)[:] = payload.view(np.float16).reshape(self.spec.block_shape)

    def _block(self, lane: int, block: int) -> npt.NDArray[np.float16]:
        return self.run.kv[:, :, lane, :, block * BLOCK : (block + 1) * BLOCK]

    def prewarm(self) -> Iterator[str]:
        return iter(())

    def adopt_kv(self, previous: Engine) -> None:
        assert isinstance(previous, GraphEngine)
        self.run.kv = previous.run.kv

    def close(self) -> None: ...
