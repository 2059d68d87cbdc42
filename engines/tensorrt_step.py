"""One kind of step on the device: its execution context, what is bound to it, and its staged inputs.

Invariants
- A tensor's address and shape are told to TensorRT when they change, and again after a failure.
- write + T ≤ S in every row of every step; T is exact. Nothing is launched otherwise.
- Staged inputs are not overwritten before the GPU has read them.

Threads: one owner, inside `Device.current()`.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt

from engines.contract import EngineSpec
from engines.cuda import Device, DeviceMemory, Stream
from engines.device_pool import KVMemory
from engines.errors import StepError
from engines.tensorrt_plan import Plan, Profile, cache_names
from engines.trt import messages

Ints = npt.NDArray[np.int64]

_ALIGNMENT = 256  # bytes; of every address that TensorRT is given
_SIZE = 8  # bytes of an input element
_IDLE_POSITION = 0  # an idle row attends to its first position alone


class StagedInputs:
    """The inputs of steps of up to `rows` rows of `tokens` tokens: page-locked, copied to the device at
    once.
    """

    def __init__(self, device: Device, stream: Stream, *, rows: int, tokens: int, positions: int) -> None:
        self._positions = positions
        self._rows = rows
        self._tokens = tokens
        self._stream = stream
        self._parts = ExitStack()
        self._offsets = _offsets([rows * tokens, rows * tokens, rows, rows])
        self._host = device.page_locked((self._offsets[-1] // _SIZE,), np.int64)
        self._parts.callback(self._host.free)
        try:
            self._memory = device.allocate(self._offsets[-1])
            self._parts.callback(self._memory.free)
            self._copied = stream.event()
            self._parts.callback(self._copied.close)
        except BaseException:
            self._parts.close()
            raise

    @property
    def addresses(self) -> dict[str, int]:
        """Where each input lies on the device."""
        names = ("input_ids", "position_ids", "write_indices", "logit_indices")
        return {
            name: self._memory.address + offset for name, offset in zip(names, self._offsets, strict=False)
        }

    def load_prefill(self, tokens: Ints, start: int) -> None:
        """One row of many tokens, logits of the last."""
        count = len(tokens)
        assert count <= self._tokens, f"{count} tokens, room for {self._tokens}"
        assert start + count <= self._positions, f"{start} + {count} > {self._positions}"
        ids, positions, written, wanted = self._views()
        ids[:count] = tokens
        positions[:count] = np.arange(start, start + count)
        written[0] = start
        wanted[0] = count - 1
        self._send()

    def load_decode(self, rows: Ints, tokens: Ints, positions: Ints) -> None:
        """One token in each of `rows`; the others are idle and write at the scratch position."""
        ids, at, written, wanted = self._views()
        ids[:] = 0
        at[:] = _IDLE_POSITION
        written[:] = self._positions - 1
        wanted[:] = 0
        ids[rows] = tokens
        at[rows] = positions
        written[rows] = positions
        assert int(written.max()) + 1 <= self._positions, f"{written} of {self._positions} positions"
        self._send()

    def close(self) -> None:
        """Free both copies. Idempotent."""
        self._parts.close()

    def _views(self) -> tuple[Ints, Ints, Ints, Ints]:
        self._copied.wait()
        words = [offset // _SIZE for offset in self._offsets]
        sizes = (self._rows * self._tokens, self._rows * self._tokens, self._rows, self._rows)
        ids, positions, written, wanted = (
            self._host.array[start : start + size] for start, size in zip(words, sizes, strict=False)
        )
        return ids, positions, written, wanted

    def _send(self) -> None:
        self._stream.upload(self._memory.address, self._host.array)
        self._copied.record()


class StepContext:
    """Runs steps of one profile."""

    def __init__(
        self, plan: Plan, profile: Profile, stream: Stream, activations: DeviceMemory, *, spec: EngineSpec
    ) -> None:
        self._spec = spec
        self._stream = stream
        self._caches = list(cache_names(spec))
        self._kv: tuple[KVMemory, int] | None = None
        self._shape = (0, 0, 0)
        self._context: Any = plan.context(profile, stream, activations)

    def bind(self, addresses: dict[str, int]) -> None:
        """Tell where tensors lie. StepError."""
        point = messages.count
        for name, address in addresses.items():
            if not self._context.set_tensor_address(name, address):
                raise StepError(f"TensorRT: the address of {name} was refused: {messages.after(point)}")

    def bind_kv(self, memory: KVMemory, lane: int) -> None:
        """Rows are the lanes of `memory` from `lane` on. StepError."""
        if self._kv is not None and self._kv[0] is memory and self._kv[1] == lane:
            return
        self._kv = None
        for index, (past, present) in enumerate(self._caches):
            address = memory.address(index // 2, index % 2, lane)
            self.bind({past: address, present: address})
        self._kv = (memory, lane)

    def shape(self, rows: int, tokens: int, window: int) -> None:
        """Tell the sizes of the next step. StepError."""
        if (rows, tokens, window) == self._shape:
            return
        old_rows, old_tokens, old_window = self._shape
        self._shape = (0, 0, 0)
        if (rows, tokens) != (old_rows, old_tokens):
            self._set_shape("input_ids", (rows, tokens))
            self._set_shape("position_ids", (rows, tokens))
        if rows != old_rows:
            g = self._spec.geometry
            self._set_shape("write_indices", (rows,))
            self._set_shape("logit_indices", (rows, 1))
            for past, _ in self._caches:
                self._set_shape(past, (rows, g.kv_heads, self._spec.positions, g.head_dim))
        if window != old_window:
            self._set_shape("kv_positions", (window,))
        self._shape = (rows, tokens, window)

    def enqueue(self) -> None:
        """Put the step into the stream. StepError with TensorRT's reason."""
        point = messages.count
        if not self._context.execute_async_v3(self._stream.handle):
            raise StepError(f"TensorRT: the step was refused: {messages.after(point)}")

    def close(self) -> None:
        """Free the context. Idempotent."""
        self._context = None
        self._kv = None

    def _set_shape(self, name: str, shape: tuple[int, ...]) -> None:
        point = messages.count
        if not self._context.set_input_shape(name, shape):
            raise StepError(f"TensorRT: {name} of shape {shape} was refused: {messages.after(point)}")


def _offsets(counts: Sequence[int]) -> list[int]:
    """Where arrays of `counts` elements begin, each aligned, and the end of the last, in bytes."""
    ends = [0]
    for count in counts:
        ends.append(-(-(ends[-1] + count * _SIZE) // _ALIGNMENT) * _ALIGNMENT)
    return ends
