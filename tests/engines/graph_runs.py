"""Runs a contract graph of either target on ONNX Runtime: lanes in place, poison beyond what was written."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from engines.contract import Geometry
from engines.onnx_emit import WEIGHTS_FILE, EmittedGraph

WINDOW_FLOOR = 32  # engines take 256; less here, so that short sequences see several windows
IDLE = -1  # as a start: this row has no token

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


def open_session(graph: EmittedGraph) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    options.log_severity_level = 3
    weights = graph.weights_bytes().tobytes()
    options.add_external_initializers_from_files_in_memory([WEIGHTS_FILE], [weights], [len(weights)])
    return ort.InferenceSession(graph.model_bytes(), options, providers=["CPUExecutionProvider"])


class GraphRun:
    """A session over `lanes` lanes of S = `positions`, whose last position is scratch.

    An idle row writes at scratch, or has no query at all where the target counts queries per row.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        geometry: Geometry,
        *,
        lanes: int,
        positions: int,
        kv_dtype: type[np.floating[Any]] = np.float32,
        poison: float = 1e4,
    ) -> None:
        self._session = session
        self._inputs = {entry.name for entry in session.get_inputs()}
        self.geometry = geometry
        self.lanes = lanes
        self.positions = positions
        g = geometry
        shape = (g.layers, 2, lanes, g.kv_heads, positions, g.head_dim)
        self.kv = np.full(shape, poison, dtype=kv_dtype)
        self._poison = poison
        self.idle_write = 1 if "query_lens" in self._inputs else self.scratch
        self.idle_queries = 0

    def poison(self) -> None:
        """Forget everything written."""
        self.kv[:] = self._poison

    @property
    def scratch(self) -> int:
        return self.positions - 1

    def step(self, tokens: Sequence[Sequence[int]], starts: Sequence[int], *, first_lane: int = 0) -> Floats:
        """Logits [B, T, V] of rows of equal length, written from `starts` (or IDLE)."""
        ids = np.asarray(tokens, dtype=np.int64)
        feed = self._feed(ids, np.asarray(starts, dtype=np.int64))
        binding = self._session.io_binding()
        binding.bind_output("logits", "cpu")
        for name, array in feed.items():
            if name in self._inputs:
                binding.bind_cpu_input(name, array)
        rows = slice(first_lane, first_lane + ids.shape[0])
        for layer in range(self.geometry.layers):
            for half, kind in enumerate(("key", "value")):
                lanes = self.kv[layer, half, rows]
                where = ("cpu", 0, lanes.dtype.type, lanes.shape, lanes.ctypes.data)
                if f"past_{kind}_{layer}" in self._inputs:
                    binding.bind_input(f"past_{kind}_{layer}", *where)
                binding.bind_output(f"present_{kind}_{layer}", *where)
        self._session.run_with_iobinding(binding)
        return np.asarray(binding.copy_outputs_to_cpu()[0])

    def _feed(self, ids: Ints, starts: Ints) -> dict[str, npt.NDArray[Any]]:
        """Every input of the contract; a graph takes those it declares."""
        batch, length = ids.shape
        steps = np.arange(length, dtype=np.int64)
        idle = starts == IDLE
        written = np.where(idle, self.idle_write, starts)
        positions = written[:, None] + steps
        longest = int(positions[~idle].max()) + 1
        window = min(self.positions, max(WINDOW_FLOOR, 1 << (longest - 1).bit_length()))
        return {
            "input_ids": ids,
            "position_ids": positions,
            "write_indices": written,
            "kv_positions": np.arange(window, dtype=np.int64),
            "logit_indices": np.tile(steps, (batch, 1)),
            "query_lens": np.where(idle, self.idle_queries, length).astype(np.int32),
        }
