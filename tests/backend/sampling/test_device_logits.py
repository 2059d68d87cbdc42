"""Logits told of by `__cuda_array_interface__`: read as torch reads them, on the stream that they name.

The memory is the host's and `torch.cuda` a double that writes down what is asked of it: there is no GPU here.
What the double offers is checked against the real `torch.cuda`.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from backend.errors import EngineFailed
from backend.generation import SamplingParams
from backend.sampling import NumpySampler, TorchSampler
from backend.sampling.device_array import is_device_array, stream_of
from engines import EngineError

SIZE = 700
STREAM = 0x5580_1234_5678
PROMPT = np.arange(3, dtype=np.int64)


class OnDevice:
    """As `engines` hands out logits of a GPU."""

    def __init__(self, values: npt.NDArray[np.float32], **told: Any) -> None:
        self.values = values
        self.told = told

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        told = {
            "version": 3,
            "shape": self.values.shape,
            "typestr": self.values.dtype.str,
            "data": (self.values.ctypes.data, False),
            "strides": None,
            "stream": STREAM,
        }
        return {name: value for name, value in {**told, **self.told}.items() if value is not Ellipsis}


class FakeCuda:
    """The part of `torch.cuda` that the sampler uses; `log` is what happened, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current: str | None = None

    def stream(self, stream: Any) -> Any:
        return self._made_current(stream)

    @contextmanager
    def _made_current(self, stream: Any) -> Iterator[None]:
        self.log.append(f"enter {stream.name}")
        self.current = stream.name
        yield
        self.current = None
        self.log.append(f"leave {stream.name}")

    def ExternalStream(self, stream_ptr: int, device: Any = None) -> Any:  # noqa: N802 (torch's name)
        return self._stream(f"{stream_ptr:#x} of {device}")

    def default_stream(self, device: Any = None) -> Any:
        return self._stream(f"default of {device}")

    def empty_cache(self) -> None:
        self.log.append("empty_cache")

    def _stream(self, name: str) -> Any:
        return SimpleNamespace(name=name, synchronize=lambda: self.log.append(f"wait for {name}"))


class FakeTorch:
    """The real torch but for `cuda`, and for `as_tensor`, which takes the address as torch does."""

    def __init__(self) -> None:
        self.cuda = FakeCuda()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def as_tensor(self, logits: Any, device: Any = None) -> torch.Tensor:
        told = logits.__cuda_array_interface__
        assert not told["data"][1], "torch refuses memory that is read only"
        memory = SimpleNamespace(__array_interface__={**told, "version": 3, "stream": None})
        return torch.as_tensor(np.asarray(memory))


@pytest.fixture
def fake() -> FakeTorch:
    return FakeTorch()


@pytest.fixture
def sampler(fake: FakeTorch) -> TorchSampler:
    made = TorchSampler(SIZE, lanes=4)
    made._torch = fake
    made._device = "cuda:0"
    return made


def values(rows: int = 3) -> npt.NDArray[np.float32]:
    return np.random.default_rng(1).normal(size=(rows, SIZE)).astype(np.float32)


def test_the_memory_is_read_where_it_lies_and_gives_the_same_tokens(sampler: TorchSampler) -> None:
    host = NumpySampler(SIZE)
    params = [SamplingParams(temperature=1.0, top_p=0.9, seed=seed) for seed in range(3)]
    logits = OnDevice(values())
    rows, others = ([form.row(one, PROMPT, logprobs=True) for one in params] for form in (sampler, host))
    for _ in range(3):
        found, expected = sampler.sample(logits, rows), host.sample(logits.values, others)
        assert found.tokens.tolist() == expected.tokens.tolist()
        logits.values[:] = np.roll(
            logits.values, 1, axis=1
        )  # the engine writes the next step to the same place


def test_a_step_is_put_on_the_stream_of_the_logits_and_waits_for_it_once(
    sampler: TorchSampler, fake: FakeTorch
) -> None:
    elsewhere: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if fake.cuda.current != f"{STREAM:#x} of cuda:0":
                elsewhere.append(str(func))
            return func(*args, **(kwargs or {}))

    rows = [sampler.row(SamplingParams(temperature=1.0, top_k=5), PROMPT) for _ in range(3)]
    own = f"{STREAM:#x} of cuda:0"
    with Watch():
        sampler.sample(OnDevice(values()), rows)
        assert fake.cuda.log == ["empty_cache", f"enter {own}", f"wait for {own}", f"leave {own}"]
        sampler.sample(OnDevice(values()), rows)
        assert fake.cuda.log[4:] == [f"enter {own}", f"wait for {own}", f"leave {own}"]
    assert elsewhere == []


@pytest.mark.parametrize("stream", [1, None, ...])
def test_the_default_stream_has_names_of_its_own(sampler: TorchSampler, fake: FakeTorch, stream: Any) -> None:
    sampler.sample(OnDevice(values(1), stream=stream), [sampler.row(SamplingParams(), PROMPT)])
    assert fake.cuda.log[0] == "enter default of cuda:0"


@pytest.mark.parametrize(
    ("field", "told"),
    [
        ("version", 2),
        ("shape", (2, SIZE)),
        ("shape", (3, SIZE + 1)),
        ("typestr", "<f2"),
        ("typestr", ">f4"),
        ("strides", (4 * SIZE + 4, 4)),
        ("strides", (4, 12)),
        ("data", (0, False)),
        ("data", (4096, True)),
        ("stream", 0),
        ("stream", 2),
    ],
)
def test_logits_that_are_not_as_agreed_fail_the_rows_by_name(
    sampler: TorchSampler, fake: FakeTorch, field: str, told: Any
) -> None:
    logits = OnDevice(values(), **{field: told})
    with pytest.raises(EngineFailed, match=f"{field}: expected .*, found"):
        stream_of(logits, rows=3, vocab_size=SIZE)
    sampled = sampler.sample(logits, [sampler.row(SamplingParams(), PROMPT) for _ in range(3)])
    assert list(sampled.failures) == [0, 1, 2]
    assert field in str(sampled.failures[0])
    assert fake.cuda.log == []


def test_strides_of_c_order_may_be_told(sampler: TorchSampler) -> None:
    logits = OnDevice(values(), strides=(4 * SIZE, 4))  # as pycuda's arrays tell theirs
    assert stream_of(logits, rows=3, vocab_size=SIZE) == STREAM


def test_arrays_and_tensors_of_the_host_are_no_device_arrays() -> None:
    assert not is_device_array(values())
    assert not is_device_array(torch.zeros(2))
    assert is_device_array(OnDevice(values()))


def test_the_double_offers_what_torch_does() -> None:
    asked = {
        name: inspect.signature(getattr(FakeCuda, name)).parameters.keys() - {"self"}
        for name in ("stream", "default_stream", "empty_cache")
    }
    for name, parameters in asked.items():
        assert parameters <= inspect.signature(getattr(torch.cuda, name)).parameters.keys()
    parameters = inspect.signature(torch.cuda.ExternalStream.__new__).parameters
    assert {"stream_ptr", "device"} <= parameters.keys()
    assert callable(torch.cuda.Stream.synchronize)


class Broken(OnDevice):
    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise EngineError("the step that wrote these logits failed")


def test_on_the_host_logits_that_cannot_be_had_fail_the_rows() -> None:
    sampler = NumpySampler(SIZE)
    sampled = sampler.sample(Broken(values(2)), [sampler.row(SamplingParams(), PROMPT) for _ in range(2)])
    assert list(sampled.failures) == [0, 1]
    assert "logits failed" in str(sampled.failures[1])
