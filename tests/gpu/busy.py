"""Keeps the GPU computing on a stream of its own while something else is checked."""

import threading
from types import TracebackType

import torch

LIMIT_S = 30.0


class BusyStream:
    """Within the block a thread multiplies matrices without pause; it must have done so when the block
    ends."""

    def __init__(self) -> None:
        self._stop, self._going = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._multiply, name="busy-stream")

    def __enter__(self) -> "BusyStream":
        self._thread.start()
        if not self._going.wait(LIMIT_S):
            self._stop.set()
            raise AssertionError(f"the other stream did not start within {LIMIT_S:.0f} s")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive(), f"the other stream did not end within {LIMIT_S:.0f} s"

    def _multiply(self) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            matrix = torch.rand(2048, 2048, device="cuda")
            while not self._stop.is_set():
                for _ in range(16):
                    matrix = torch.nn.functional.normalize(matrix @ matrix)
                stream.synchronize()
                self._going.set()
