"""Logits that stay on the device until somebody asks for them on the host.

`__cuda_array_interface__` gives them to whoever computes on the GPU; its `stream` is the one that writes
them, so work put into that stream needs no wait. `numpy.asarray` copies them to the host and waits.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from engines.cuda import Device, PageLockedArray, Stream
from engines.errors import DeviceError, DeviceLostError, StepError


class DeviceLogits:
    """[rows, vocab] float32 on the device, valid until the engine's next step."""

    def __init__(
        self, device: Device, stream: Stream, address: int, shape: tuple[int, int], host: PageLockedArray
    ) -> None:
        """`host` is room for as many values; whoever owns it frees it."""
        self._device = device
        self._stream = stream
        self._address = address
        self._host = host
        self.shape = shape
        self.dtype = np.dtype(np.float32)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3 of the interface."""
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self._address, False),
            "strides": None,
            "stream": self._stream.handle,
        }

    def __array__(self, dtype: npt.DTypeLike = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """A copy on the host, which is the caller's. StepError if the step that wrote it failed;
        DeviceLostError.
        """
        assert copy is not False, "logits on the device are always copied"
        rows, vocab = self.shape
        host: npt.NDArray[np.float32] = self._host.array[: rows * vocab]
        try:
            with self._device.current():
                self._stream.download(host, self._address)
                self._stream.synchronise()
        except DeviceError as error:
            if self._device.is_lost(self._stream):
                raise DeviceLostError(f"GPU {self._device.info.ordinal} is lost: {error}") from error
            raise StepError(f"the step that wrote these logits failed: {error}") from error
        return np.array(host, dtype=dtype).reshape(rows, vocab)
