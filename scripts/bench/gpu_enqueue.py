"""TensorRT's own time for a decode step: the same plan, context and shapes, with nothing of ours around it.

Threads: one.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np

from engines import EngineSpec, VerifiedRelease
from engines.cuda import Device, Stream, open_device
from engines.device_pool import DevicePool
from engines.tensorrt_plan import Plan, cache_names


class OwnStep:
    """A decode of `rows` rows in a window, enqueued and waited for. Its inputs are zeros and never change."""

    def __init__(
        self, owned: ExitStack, device: Device, plan: Plan, spec: EngineSpec, *, rows: int, window: int
    ) -> None:
        self._device = device
        self._stream: Stream = device.stream()
        owned.callback(self._stream.close)
        pool = DevicePool(device, self._stream, spec, lanes=rows)
        owned.callback(pool.free)
        activations = device.allocate(max(plan.activation_bytes, 256))
        owned.callback(activations.free)
        self._context = plan.context(plan.decode, self._stream, activations)
        owned.callback(self._drop_context)
        g = spec.geometry
        sizes = {
            "input_ids": (rows, 1), "position_ids": (rows, 1), "write_indices": (rows,),
            "logit_indices": (rows, 1), "kv_positions": (window,),
        }  # fmt: skip
        for name, shape in sizes.items():
            values = np.arange(window) if name == "kv_positions" else np.zeros(shape)
            memory = device.allocate(8 * int(np.prod(shape)))
            owned.callback(memory.free)
            self._stream.upload(memory.address, values.astype(np.int64))
            self._stream.synchronise()  # the array on the host goes
            self._bind(name, memory.address)
            self._expect(self._context.set_input_shape(name, shape), f"shape of {name}")
        logits = device.allocate(4 * rows * g.vocab_size)
        owned.callback(logits.free)
        self._bind("logits", logits.address)
        for index, (past, present) in enumerate(cache_names(spec)):
            address = pool.address(index // 2, index % 2, 0)
            self._bind(past, address)
            self._bind(present, address)
            shape = (rows, g.kv_heads, spec.positions, g.head_dim)
            self._expect(self._context.set_input_shape(past, shape), f"shape of {past}")

    def run(self) -> None:
        """One step, and the wait for it."""
        with self._device.current():
            self._expect(self._context.execute_async_v3(self._stream.handle), "step")
            self._stream.synchronise()

    def _drop_context(self) -> None:
        self._context = None

    def _bind(self, name: str, address: int) -> None:
        self._expect(self._context.set_tensor_address(name, address), f"address of {name}")

    @staticmethod
    def _expect(accepted: bool, what: str) -> None:
        if not accepted:
            raise RuntimeError(f"TensorRT refused the {what}")


@contextmanager
def own_plan(release: VerifiedRelease, spec: EngineSpec) -> Iterator[Plan]:
    """The plan of `release`, deserialised once more: it takes its weights' room on the device again."""
    device = open_device(0)
    with device.current():
        plan = Plan(release.files[release.manifest.graph], spec, kv_dtype=release.manifest.kv_dtype)
    del release  # the bytes of an 8B plan are 16 GB
    try:
        yield plan
    finally:
        with device.current():
            plan.close()


@contextmanager
def own_step(plan: Plan, spec: EngineSpec, *, rows: int, window: int) -> Iterator[OwnStep]:
    """A step ready to run; what it takes on the device is given back at the end."""
    device, owned = open_device(0), ExitStack()
    try:
        with device.current():
            step = OwnStep(owned, device, plan, spec, rows=rows, window=window)
        yield step
    finally:
        with device.current():
            owned.close()
