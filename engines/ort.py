"""The CPU engine: runs the contract graph with ONNX Runtime, in place on a pool of lanes.

A prefill binds the K/V tensors of the graph at one lane's slice of the pool; a decode binds the span from
the lowest to the highest lane it names, and gives the lanes between them zero queries, which leaves them
untouched.

Invariants
- A step writes positions of the lanes it names, and the one position after the last written (see
  graph_onnxruntime).
- Logits and KV have the same bits whatever the split, the batch, the lanes, the threads and the room
  (`spec.exact`).

Threads: one owner; the interpreter lock is free while the graph runs.
"""

import logging
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from engines.contract import Engine, EngineSpec, LaneId, Logits, shares_kv
from engines.engine_spec import cache_positions as cache_positions
from engines.engine_spec import engine_spec
from engines.errors import ReleaseError, StepError
from engines.io_contract import check_contract
from engines.kernel_class import identity_here, kernel_class
from engines.kv_pool import KVPool
from engines.manifest import EngineManifest
from engines.options import EngineOptions

log = logging.getLogger(__name__)

_IDLE_POSITION = 1  # the kernel wants at least one cached position, which it does not read or write
_MAX_SPANS = 64  # decode bindings kept; lowest-lane-first reservation needs far fewer
_SPIN_US = "200"  # long enough to bridge two kernels, short enough not to burn a core between steps
_ERRORS_ONLY = 3
_WARM_TOKENS = 64


class OrtEngine:
    """Implements `engines.contract.Engine` for releases of runtime "onnxruntime"."""

    def __init__(
        self,
        manifest: EngineManifest,
        files: Mapping[str, memoryview],
        *,
        options: EngineOptions,
        digest: str,
    ) -> None:
        """Open the release from the bytes in `files`, which may be dropped afterwards. ReleaseError."""
        self._spec = _spec(manifest, options, digest)
        self._session = _session(manifest, files, options)
        check_contract(
            self._spec, _tensors(self._session.get_inputs()), _tensors(self._session.get_outputs())
        )
        self._pool = KVPool(self._spec)
        self._prefills: dict[LaneId, _Binding] = {}
        self._decodes: OrderedDict[tuple[int, int], _Binding] = OrderedDict()
        self._closed = False

    @property
    def spec(self) -> EngineSpec:
        """Facts that never change while the engine lives."""
        return self._spec

    def prefill(self, lane: LaneId, tokens: npt.NDArray[np.int64], start: int) -> Logits:
        """See `Engine.prefill`."""
        spec, count = self._spec, len(tokens)
        assert not self._closed, "prefill after close"
        assert 0 <= lane < spec.lanes, f"lane {lane} of {spec.lanes}"
        assert tokens.shape == (count,), f"tokens of shape {tokens.shape}"
        assert 1 <= count <= spec.max_prefill_tokens, f"{count} tokens, at most {spec.max_prefill_tokens}"
        assert 0 <= start <= spec.max_seq_len - count, f"{start} + {count} > {spec.max_seq_len}"
        self._check_tokens(tokens)
        binding = self._prefills.get(lane)
        if binding is None:
            binding = self._prefills[lane] = _Binding(self._session, self._pool, spec, first=lane, rows=1)
        binding.load_prefill(tokens, start)
        binding.run()
        return Logits(binding.logits)

    def decode(
        self, lanes: Sequence[LaneId], tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> Logits:
        """See `Engine.decode`."""
        spec = self._spec
        assert not self._closed, "decode after close"
        assert len(lanes) == len(tokens) == len(positions) >= 1, (
            "lanes, tokens and positions differ in length"
        )
        rows = np.asarray(lanes, dtype=np.int64)
        first, last = int(rows.min()), int(rows.max())
        assert 0 <= first <= last < spec.lanes, f"lanes {list(lanes)} of {spec.lanes}"
        assert len(set(lanes)) == len(lanes), f"lanes {list(lanes)} repeat"
        assert 0 <= positions.min() <= positions.max() < spec.max_seq_len, f"positions {positions}"
        self._check_tokens(tokens)
        binding = self._decode_binding(first, last - first + 1)
        binding.load_decode(rows - first, tokens, positions)
        binding.run()
        if np.array_equal(rows, np.arange(first, last + 1)):
            return Logits(binding.logits)
        return Logits(binding.logits[rows - first])

    def export_blocks(self, lane: LaneId, blocks: range, out: Sequence[npt.NDArray[np.uint8]]) -> None:
        """See `Engine.export_blocks`."""
        self._pool.export_blocks(lane, blocks, out)

    def import_blocks(self, lane: LaneId, blocks: range, payloads: Sequence[npt.NDArray[np.uint8]]) -> None:
        """See `Engine.import_blocks`."""
        self._pool.import_blocks(lane, blocks, payloads)

    def prewarm(self) -> Iterator[str]:
        """Run a prefill, the shortest ones, and a decode over every number of lanes.

        The kernels are the same for every length: a longer prefill would warm no more, and another engine's
        streams may wait for it.
        """
        spec = self._spec
        longest = min(spec.max_prefill_tokens, _WARM_TOKENS)
        for count in sorted({1, min(2, longest), longest}, reverse=True):
            self.prefill(LaneId(0), np.zeros(count, dtype=np.int64), 0)
            yield f"prefill of {count}"
        for rows in range(1, spec.lanes + 1):
            zeros = np.zeros(rows, dtype=np.int64)
            self.decode([LaneId(lane) for lane in range(rows)], zeros, zeros)
            yield f"decode of {rows}"

    def adopt_kv(self, previous: Engine) -> None:
        """Use the pool of `previous`; ours, of which little was ever written, goes back to the system."""
        assert isinstance(previous, OrtEngine), f"the KV of a {type(previous).__name__}"
        assert shares_kv(self._spec, previous.spec), "lanes of another identity or layout"
        assert not self._closed, "adopt_kv after close"
        self._prefills.clear()  # bindings hold addresses of the pool
        self._decodes.clear()
        self._pool = previous.give_kv()

    def give_kv(self) -> KVPool:
        """Hand the pool to a successor; afterwards this engine can only be closed."""
        pool = self._pool
        self.close()
        return pool

    def close(self) -> None:
        """Free the session and the pool. Idempotent."""
        self._closed = True
        self._prefills.clear()
        self._decodes.clear()
        if hasattr(self, "_session"):
            del self._session, self._pool

    def _check_tokens(self, tokens: npt.NDArray[np.int64]) -> None:
        assert 0 <= tokens.min() <= tokens.max() < self._spec.geometry.vocab_size, (
            "token outside the vocabulary"
        )

    def _decode_binding(self, first: int, rows: int) -> "_Binding":
        binding = self._decodes.get((first, rows))
        if binding is None:
            binding = _Binding(self._session, self._pool, self._spec, first=first, rows=rows)
            self._decodes[first, rows] = binding
            if len(self._decodes) > _MAX_SPANS:
                self._decodes.popitem(last=False)
        self._decodes.move_to_end((first, rows))
        return binding


class _Binding:
    """A kept binding of the graph's inputs and outputs to `rows` lanes from `first`; making one costs half a
    millisecond.
    """

    def __init__(self, session: Any, pool: KVPool, spec: EngineSpec, *, first: int, rows: int) -> None:
        self._session = session
        self._binding = session.io_binding()
        self._tokens = np.zeros((rows, 1), dtype=np.int64)
        self._written = np.zeros(rows, dtype=np.int64)
        self._query_lens = np.zeros(rows, dtype=np.int32)
        self._wanted = np.zeros((rows, 1), dtype=np.int64)
        self._logits = np.zeros((rows, 1, spec.geometry.vocab_size), dtype=np.float32)
        self._bind_input("input_ids", self._tokens)
        self._bind_input("write_indices", self._written)
        self._bind_input("query_lens", self._query_lens)
        self._bind_input("logit_indices", self._wanted)
        self._bind_output("logits", self._logits.dtype, self._logits.shape, _address(self._logits))
        cache = (rows, spec.geometry.kv_heads, spec.positions, spec.geometry.head_dim)
        for layer in range(spec.geometry.layers):
            for kind, name in enumerate(("key", "value")):
                address = pool.address(layer, kind, first)
                self._binding.bind_input(f"past_{name}_{layer}", "cpu", 0, spec.kv_dtype, cache, address)
                self._bind_output(f"present_{name}_{layer}", spec.kv_dtype, cache, address)

    @property
    def logits(self) -> npt.NDArray[np.float32]:
        """[rows, vocab] of the last run."""
        return self._logits[:, 0]

    def load_prefill(self, tokens: npt.NDArray[np.int64], start: int) -> None:
        """One row of many tokens, logits of the last."""
        self._tokens = np.ascontiguousarray(tokens).reshape(1, -1)  # kept: the runtime holds its address only
        self._bind_input("input_ids", self._tokens)
        self._written[0] = start
        self._query_lens[0] = len(tokens)
        self._wanted[0, 0] = len(tokens) - 1

    def load_decode(
        self, rows: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> None:
        """One token in each of `rows`; the others are idle."""
        self._written[:] = _IDLE_POSITION
        self._query_lens[:] = 0
        self._tokens[rows, 0] = tokens
        self._written[rows] = positions
        self._query_lens[rows] = 1

    def run(self) -> None:
        """Run the graph; StepError if the runtime refuses."""
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # the runtime has a class per status code and no common root but this
            raise StepError(f"onnxruntime: {str(error).strip()}") from error

    def _bind_input(self, name: str, array: npt.NDArray[Any]) -> None:
        self._binding.bind_input(name, "cpu", 0, array.dtype, array.shape, _address(array))

    def _bind_output(self, name: str, dtype: Any, shape: tuple[int, ...], address: int) -> None:
        self._binding.bind_output(name, "cpu", 0, dtype, shape, address)


def _address(array: npt.NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _spec(manifest: EngineManifest, options: EngineOptions, digest: str) -> EngineSpec:
    here = kernel_class()
    built = bytes.fromhex(manifest.kv_identity)
    identity = identity_here(built, built_for=manifest.kernel_class, here=here)
    spec = engine_spec(manifest, options, digest, kv_identity=identity)
    if identity != built:
        log.warning(
            "%s release %d was built for CPU kernels %r and runs on %r: its KV is kept apart",
            manifest.model, manifest.release, manifest.kernel_class, here,
        )  # fmt: skip
    return spec


def _session(manifest: EngineManifest, files: Mapping[str, memoryview], options: EngineOptions) -> Any:
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = options.threads or len(os.sched_getaffinity(0))
    settings.inter_op_num_threads = 1
    settings.log_severity_level = _ERRORS_ONLY
    settings.add_session_config_entry("session.intra_op.spin_duration_us", _SPIN_US)
    settings.enable_mem_pattern = False  # shapes change from step to step
    external = [name for name in files if name.endswith(".bin")]
    settings.add_external_initializers_from_files_in_memory(
        external, [files[name] for name in external], [files[name].nbytes for name in external]
    )
    try:
        return onnxruntime.InferenceSession(
            bytes(files[manifest.graph]), sess_options=settings, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # see _Binding.run
        raise ReleaseError(
            "deserialise",
            expected=f"a graph that onnxruntime {onnxruntime.__version__} loads",
            found=str(error),
        ) from error


def _tensors(nodes: Any) -> dict[str, tuple[str, tuple[int | str, ...]]]:
    return {node.name: (str(node.type), tuple(node.shape)) for node in nodes}
