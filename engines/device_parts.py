"""What a GPU engine holds beside its lanes: stream, plan, contexts, staged inputs, logits, graphs.

Invariants
- Parts are taken in an order in which each may use those before it, and given back in the reverse order,
  also when taking one of them fails.
- Both contexts use one allocation for activations: their steps follow one another in one stream.

Threads: one owner, inside `Device.current()`.
"""

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol, TypeVar

import numpy as np

from engines.contract import EngineSpec
from engines.cuda import Device, DeviceMemory
from engines.device_memory import DeviceNeed, logits_bytes, require_device_memory
from engines.step_graphs import StepGraphs, graph_recorder
from engines.tensorrt_plan import Plan, Profile
from engines.tensorrt_step import StagedInputs, StepContext

_LEAST_ALLOCATION = 256  # bytes: a plan may need no activations, and nothing cannot be allocated


class _Closes(Protocol):
    def close(self) -> None: ...


class _Frees(Protocol):
    def free(self) -> None: ...


C = TypeVar("C", bound=_Closes)
F = TypeVar("F", bound=_Frees)
P = TypeVar("P")


class DeviceParts:
    """Everything but the lanes; `close` gives it back."""

    def __init__(
        self,
        device: Device,
        plan: memoryview,
        spec: EngineSpec,
        *,
        kv_dtype: str,
        need: DeviceNeed,
        cuda_graphs: bool,
    ) -> None:
        """ReleaseError (steps "deserialise", "contract", "gpu_memory"), DeviceError, StepError."""
        self._owned = ExitStack()
        try:
            self.stream = self._closes(device.stream())
            self.plan = self._closes(Plan(plan, spec, kv_dtype=kv_dtype))
            activations = self.plan.activation_bytes
            left = dataclasses.replace(need, weights=0, activations=activations)
            require_device_memory(left, free=device.memory()[0])  # as the plan itself says
            self._activations = self._frees(device.allocate(max(activations, _LEAST_ALLOCATION)))
            self._take_buffers(device, spec)
            self.prefill = self._context(self.plan.prefill, self.prefill_inputs, spec)
            self.decode = self._context(self.plan.decode, self.decode_inputs, spec)
            self.graphs = StepGraphs(self.stream, graph_recorder(wanted=cuda_graphs))
            self._owned.callback(self.graphs.clear)
            self.stream.synchronise()  # profiles are chosen, positions uploaded
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give everything back. Idempotent."""
        self._owned.close()

    def _take_buffers(self, device: Device, spec: EngineSpec) -> None:
        vocab, every_position = spec.geometry.vocab_size, np.arange(spec.positions, dtype=np.int64)
        self.logits = self._frees(device.allocate(logits_bytes(spec)))
        self.gathered = self._frees(device.allocate(logits_bytes(spec)))
        self.host_logits = self._frees(device.page_locked((spec.lanes * vocab,), np.float32))
        self.prefill_inputs = self._closes(
            StagedInputs(
                device, self.stream, rows=1, tokens=spec.max_prefill_tokens, positions=spec.positions
            )
        )
        self.decode_inputs = self._closes(
            StagedInputs(device, self.stream, rows=spec.lanes, tokens=1, positions=spec.positions)
        )
        self._positions = self._frees(device.allocate(every_position.nbytes))
        self.stream.upload(self._positions.address, every_position)
        self.stream.synchronise()  # the array on the host goes

    def _context(self, profile: Profile, inputs: StagedInputs, spec: EngineSpec) -> StepContext:
        memory: DeviceMemory = self._activations
        context = self._closes(StepContext(self.plan, profile, self.stream, memory, spec=spec))
        windows = {"kv_positions": self._positions.address}
        context.bind(inputs.addresses | windows | {"logits": self.logits.address})
        return context

    def _closes(self, part: C) -> C:
        return self._own(part, part.close)

    def _frees(self, part: F) -> F:
        return self._own(part, part.free)

    def _own(self, part: P, give_back: Callable[[], None]) -> P:
        self._owned.callback(give_back)
        return part
