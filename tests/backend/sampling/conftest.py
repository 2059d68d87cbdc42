"""Both forms of the sampler, for the one behaviour suite: numpy, and torch on CPU tensors."""

from collections.abc import Callable, Iterator

import pytest
import torch

from backend.sampling import NumpySampler, TorchSampler
from backend.sampling import torch_sampler as form

MakeSampler = Callable[..., NumpySampler | TorchSampler]


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of torch that wait for each other on a busy machine take longer than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _numpy(vocab_size: int, **options: object) -> NumpySampler:
    return NumpySampler(vocab_size, **options)


def _torch(vocab_size: int, **options: object) -> TorchSampler:
    return TorchSampler(vocab_size, lanes=16, **options)


def _torch_in_slabs(vocab_size: int, **options: object) -> TorchSampler:
    """Two rows at a time: every batch of the suite is worked on in parts."""
    sampler = TorchSampler(vocab_size, lanes=2, **options)
    assert form.SLAB_TOKENS // vocab_size >= 2
    return sampler


FORMS: dict[str, MakeSampler] = {"numpy": _numpy, "torch": _torch, "torch_in_slabs": _torch_in_slabs}


@pytest.fixture(params=FORMS.values(), ids=FORMS.keys(), scope="session")
def make_sampler(request: pytest.FixtureRequest) -> MakeSampler:
    """`make_sampler(vocab_size, uniforms=…)`."""
    return request.param
