"""The GPU engine: runs a plan with TensorRT, in place on a pool of lanes in device memory.

    prefill   binds the K/V tensors at one lane's slice of the pool; one row of T tokens
    decode    binds them once at the pool's start; its rows are the lanes 0 … n−1, idle ones included

Both run in one stream. Prefill and decode return while the GPU still works: whoever reads the logits, or
the next step, meets what went wrong. A step that failed alone is a StepError; where the driver has given the
process up, every call raises DeviceLostError.

Invariants
- An idle row of a decode writes at the scratch position S − 1, which no mask reaches, and attends to
  position 0.
- Graphs keep addresses of the lanes: they are dropped before the lanes change.
- All that is taken on the device is `_parts` and the lanes; `close` gives both back, also half-way through
  opening.

Threads: one owner at a time, on any thread: every method makes the device's context current for itself.
The interpreter lock is free while TensorRT deserialises or enqueues and while the GPU is waited for.
"""

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import numpy.typing as npt

from engines.contract import Engine, EngineSpec, LaneId, Logits, shares_kv
from engines.cuda import open_device
from engines.device_logits import DeviceLogits
from engines.device_memory import device_need, require_device_memory
from engines.device_parts import DeviceParts
from engines.device_pool import DevicePool, SharedLayer
from engines.engine_spec import cache_positions, engine_spec
from engines.errors import DeviceError, DeviceLostError, DeviceMemoryError, ReleaseError, StepError
from engines.manifest import EngineManifest
from engines.options import EngineOptions
from engines.windows import row_counts, rows_for, window_for, windows

log = logging.getLogger(__name__)

Ints = npt.NDArray[np.int64]

_NOTHING: Ints = np.zeros(0, np.int64)


class TensorRTEngine:
    """Implements `engines.contract.Engine` for releases of runtime "tensorrt"."""

    def __init__(
        self,
        manifest: EngineManifest,
        files: Mapping[str, memoryview],
        *,
        options: EngineOptions,
        digest: str,
        beside: EngineSpec | None = None,
    ) -> None:
        """Open the release from the bytes in `files`, which may be dropped afterwards.

        `beside` an engine whose lanes are ours: take but the room that a warm-up needs; `adopt_kv` brings
        the lanes. ReleaseError, DeviceError, StepError.
        """
        self._spec = _spec(manifest, options, digest)
        self._closed = False
        self._adopts = beside is not None and shares_kv(self._spec, beside)
        self._parts: DeviceParts | None = None
        self._pool: DevicePool | None = None
        self._shared: SharedLayer | None = None
        self._device = open_device(options.device)
        try:
            with self._device.current():
                self._open(manifest, files[manifest.graph], options)
        except DeviceMemoryError as error:
            self.close()
            raise ReleaseError("gpu_memory", expected="room for the engine", found=str(error)) from None
        except BaseException:
            self.close()
            raise

    @property
    def spec(self) -> EngineSpec:
        """Facts that never change while the engine lives."""
        return self._spec

    def prefill(self, lane: LaneId, tokens: Ints, start: int) -> Logits:
        """See `Engine.prefill`."""
        spec, count = self._spec, len(tokens)
        parts, pool = self._opened("prefill")
        assert 0 <= lane < pool.lanes, f"lane {lane} of {pool.lanes}"
        assert tokens.shape == (count,), f"tokens of shape {tokens.shape}"
        assert 1 <= count <= spec.max_prefill_tokens, f"{count} tokens, at most {spec.max_prefill_tokens}"
        assert 0 <= start <= spec.max_seq_len - count, f"{start} + {count} > {spec.max_seq_len}"
        self._check_tokens(tokens)
        with self._step():
            self._run_prefill(lane, tokens, start, window=window_for(start + count, spec.positions))
        return self._logits(parts.logits.address, 1)

    def decode(self, lanes: Sequence[LaneId], tokens: Ints, positions: Ints) -> Logits:
        """See `Engine.decode`. Lanes in ascending order are cheapest: their rows need few or no copies."""
        spec = self._spec
        parts, pool = self._opened("decode")
        assert len(lanes) == len(tokens) == len(positions) >= 1, (
            "lanes, tokens and positions differ in length"
        )
        rows = np.asarray(lanes, dtype=np.int64)
        assert 0 <= rows.min() <= rows.max() < pool.lanes, f"lanes {list(lanes)} of {pool.lanes}"
        assert len(set(lanes)) == len(lanes), f"lanes {list(lanes)} repeat"
        assert 0 <= positions.min() <= positions.max() < spec.max_seq_len, f"positions {positions}"
        self._check_tokens(tokens)
        count = rows_for(int(rows.max()) + 1, spec.lanes)
        window = window_for(int(positions.max()) + 1, spec.positions)
        with self._step():
            parts.decode_inputs.load_decode(rows, tokens, positions)
            self._run_decode(count, window)
            address = self._gather(rows)
        return self._logits(address, len(rows))

    def export_blocks(self, lane: LaneId, blocks: range, out: Sequence[npt.NDArray[np.uint8]]) -> None:
        """See `Engine.export_blocks`."""
        parts, pool = self._opened("export_blocks")
        with self._step():
            pool.export_blocks(parts.stream, lane, blocks, out)

    def import_blocks(self, lane: LaneId, blocks: range, payloads: Sequence[npt.NDArray[np.uint8]]) -> None:
        """See `Engine.import_blocks`."""
        parts, pool = self._opened("import_blocks")
        with self._step():
            pool.import_blocks(parts.stream, lane, blocks, payloads)

    def prewarm(self) -> Iterator[str]:
        """Run prefills of most, best and least tokens and decodes of each number of rows, in each window.

        Decodes are recorded as graphs, unless the lanes, whose addresses a graph keeps, are still to come.
        """
        spec = self._spec
        parts, _ = self._opened("prewarm")
        least, best, _ = parts.plan.prefill.tokens
        counts = {least, min(best, spec.max_prefill_tokens), spec.max_prefill_tokens}
        shapes = [(count, window) for count in sorted(counts) for window in windows(spec.positions)]
        for count, window in reversed([shape for shape in shapes if shape[0] <= shape[1]]):
            with self._step():
                self._run_prefill(LaneId(0), np.zeros(count, np.int64), 0, window=window)
                parts.stream.synchronise()
            yield f"prefill of {count} in a window of {window}"
        for rows in reversed(row_counts(spec.lanes)):
            for window in reversed(windows(spec.positions)):
                with self._step():
                    parts.decode_inputs.load_decode(_NOTHING, _NOTHING, _NOTHING)
                    self._run_decode(rows, window)
                    parts.stream.synchronise()
                yield f"decode of {rows} in a window of {window}"

    def adopt_kv(self, previous: Engine) -> None:
        """Use the pool of `previous`. Graphs come back one at a time, with the first step of each shape,
        so that no stream waits for all of them.
        """
        assert isinstance(previous, TensorRTEngine), f"the KV of a {type(previous).__name__}"
        assert shares_kv(self._spec, previous.spec), "lanes of another identity or layout"
        assert self._device is previous._device, "lanes on another GPU"
        parts, _ = self._opened("adopt_kv")
        with self._step():
            parts.stream.synchronise()
            parts.graphs.clear()
            own = (self._pool, self._shared)
            self._pool, self._shared, self._adopts = previous.give_kv(), None, False
            _free(*own)

    def give_kv(self) -> DevicePool:
        """Hand the pool to a successor; afterwards this engine can only be closed.

        Freeing the rest is left to whoever closes it: that takes longer than streams should wait between two
        steps, and may be done on another thread.
        """
        parts, pool = self._opened("give_kv")
        assert not self._adopts, "lanes that were never adopted"
        with self._step():
            parts.stream.synchronise()
        self._pool = None
        return pool

    def close(self) -> None:
        """Free everything, whatever the device says to it. Idempotent."""
        if self._closed:
            return
        self._closed = True
        parts, self._parts = self._parts, None
        try:
            with self._device.current(), ExitStack() as last:
                last.callback(self._free_lanes)
                if parts is not None:
                    last.callback(parts.close)
                    parts.stream.synchronise()
        except DeviceError as error:
            log.warning(
                "engine closed on a device that failed: model=%s release=%d: %s",
                self._spec.model, self._spec.release, error,
            )  # fmt: skip

    def _free_lanes(self) -> None:
        own = (self._pool, self._shared)
        self._pool = self._shared = None
        _free(*own)

    def _open(self, manifest: EngineManifest, plan: memoryview, options: EngineOptions) -> None:
        spec, device = self._spec, self._device
        graphs = options.cuda_graphs
        need = device_need(spec, manifest, adopts=self._adopts, cuda_graphs=graphs)
        free, _ = device.memory()
        log.info(
            "engine memory: model=%s release=%d gpu=%d need=%s free=%d",
            spec.model, spec.release, device.info.ordinal, need, free,
        )  # fmt: skip
        require_device_memory(need, free=free)
        self._parts = parts = DeviceParts(
            device, plan, spec, kv_dtype=manifest.kv_dtype, need=need, cuda_graphs=graphs
        )
        self._pool = DevicePool(device, parts.stream, spec, lanes=1 if self._adopts else spec.lanes)
        if self._adopts and spec.lanes > 1:
            self._shared = SharedLayer(device, parts.stream, spec)
        parts.stream.synchronise()

    def _opened(self, call: str) -> tuple[DeviceParts, DevicePool]:
        assert self._parts is not None, f"{call} after close"
        assert self._pool is not None, f"{call} after the lanes were given away"
        return self._parts, self._pool

    def _check_tokens(self, tokens: Ints) -> None:
        assert 0 <= tokens.min() <= tokens.max() < self._spec.geometry.vocab_size, (
            "token outside the vocabulary"
        )

    @contextmanager
    def _step(self) -> Iterator[None]:
        """Work on the device; its errors are the step's, unless no later step can work either."""
        try:
            with self._device.current():
                yield
        except (DeviceError, StepError) as error:
            if self._parts is not None and self._device.is_lost(self._parts.stream):
                raise DeviceLostError(f"GPU {self._device.info.ordinal} is lost: {error}") from error
            raise StepError(str(error)) from error

    def _run_prefill(self, lane: LaneId, tokens: Ints, start: int, *, window: int) -> None:
        parts, pool = self._opened("prefill")
        parts.prefill_inputs.load_prefill(tokens, start)
        parts.prefill.bind_kv(pool, lane)
        parts.prefill.shape(1, len(tokens), window)
        parts.prefill.enqueue()

    def _run_decode(self, rows: int, window: int) -> None:
        """Run the decode whose inputs are loaded, by its graph if there is one, else making one of it."""
        parts, pool = self._opened("decode")
        if parts.graphs.launch((rows, window)):
            return
        lanes = self._shared if self._shared is not None and rows > pool.lanes else pool
        parts.decode.bind_kv(lanes, 0)
        parts.decode.shape(rows, 1, window)
        parts.decode.enqueue()
        if not self._adopts:
            parts.graphs.record((rows, window), parts.decode.enqueue)

    def _gather(self, rows: Ints) -> int:
        """Where the logits of `rows` lie in that order: where the step put them, or copied together."""
        parts, _ = self._opened("decode")
        if np.array_equal(rows, np.arange(len(rows))):
            return parts.logits.address
        row = self._spec.geometry.vocab_size * parts.host_logits.array.itemsize
        starts = np.flatnonzero(np.diff(rows, prepend=rows[0]) != 1).tolist()
        for first, end in zip(starts, [*starts[1:], len(rows)], strict=True):
            source = parts.logits.address + int(rows[first]) * row
            parts.stream.copy(parts.gathered.address + first * row, source, (end - first) * row)
        return parts.gathered.address

    def _logits(self, address: int, rows: int) -> Logits:
        parts, _ = self._opened("logits")
        shape = (rows, self._spec.geometry.vocab_size)
        array = DeviceLogits(self._device, parts.stream, address, shape, parts.host_logits)
        return Logits(array, device=f"cuda:{self._device.info.ordinal}", stream=parts.stream.handle)


def _free(pool: DevicePool | None, shared: SharedLayer | None) -> None:
    for lanes in (pool, shared):
        if lanes is not None:
            lanes.free()


def _spec(manifest: EngineManifest, options: EngineOptions, digest: str) -> EngineSpec:
    """S and the most lanes are fixed in the plan; fewer positions may be used than there are."""
    if options.lanes is not None and options.lanes > manifest.lanes:
        raise ReleaseError(
            "options", expected=f"lanes in 1 … {manifest.lanes} (the plan's)", found=str(options.lanes)
        )
    spec = engine_spec(manifest, options, digest, kv_identity=bytes.fromhex(manifest.kv_identity))
    return dataclasses.replace(spec, positions=cache_positions(manifest.max_seq_len, manifest.block_tokens))
