"""Between (6) and (9): sampling by torch on the engine's own logits, against the numpy form on the host."""

import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tests.gpu import sampler_checks
from tests.gpu.node import Node
from tests.gpu.sampler_checks import KINDS, device_sampler, some_logits
from tests.gpu.torch_reference import Precision

DEVICE = "cuda:0"
A_WHILE = 500_000_000  # cycles of the GPU's clock: a quarter of a second


class OnStream:
    """Values in device memory, told of as an engine tells of its logits: with the stream that writes them."""

    def __init__(self, values: npt.NDArray[np.float32], stream: int) -> None:
        self.stream = stream
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
            self.tensor = torch.from_numpy(values).to(DEVICE)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self.tensor.__cuda_array_interface__, "version": 3, "stream": self.stream}


def test_both_forms_of_the_sampler_agree(node: Node, precision: Precision) -> None:
    engine = node.engine(precision)
    print(sampler_checks.forms_agree(engine, device_sampler(engine)))


def test_rows_neither_feel_nor_spoil_each_other(node: Node, precision: Precision) -> None:
    engine = node.engine(precision)
    values, logits = some_logits(engine)
    assert logits.stream is not None
    stream = logits.stream

    def place(some: npt.NDArray[np.float32]) -> OnStream:
        return OnStream(some, stream)

    sampler = device_sampler(engine)
    print(sampler_checks.rows_are_on_their_own(values, sampler, place=place))
    print(sampler_checks.spoiled_rows_fail_alone(values, sampler, place=place))


def test_a_step_is_sampled_on_the_stream_that_writes_it(node: Node, precision: Precision) -> None:
    """What is put into that stream before is seen, however late it comes."""
    engine = node.engine(precision)
    values, logits = some_logits(engine)
    assert logits.stream is not None
    sampler = device_sampler(engine)
    late = OnStream(values, logits.stream)
    fresh = OnStream(np.roll(values, 1, axis=1), logits.stream)  # every token is the next one
    rows = [sampler.row(KINDS["greedy"], np.arange(3)) for _ in values]
    expected = sampler.sample(fresh, rows).tokens.tolist()
    assert sampler.sample(late, rows).tokens.tolist() != expected
    with torch.cuda.stream(torch.cuda.ExternalStream(logits.stream)):
        torch.cuda._sleep(A_WHILE)
        late.tensor.copy_(fresh.tensor)
    assert sampler.sample(late, rows).tokens.tolist() == expected, "read before it was written"


def test_a_step_is_waited_for_once(node: Node, precision: Precision) -> None:
    """The choice itself is enqueued, whatever rows ask for: torch tells every wait that it knows of."""
    engine = node.engine(precision)
    _, logits = some_logits(engine)
    sampler, kinds = device_sampler(engine), [*KINDS.values()]
    mask = np.full((engine.spec.lanes, -(-engine.spec.geometry.vocab_size // 32)), -1, np.int32)
    for first in range(len(kinds)):
        asked = [kinds[(first + row) % len(kinds)] for row in range(engine.spec.lanes)]
        rows = [
            sampler.row(one, np.arange(3), min_tokens=4, eos_token_ids=(0,), logprobs=True) for one in asked
        ]
        sampler.sample(logits.array, rows, allowed_mask=mask)  # room for what these rows ask for
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as waits:
                warnings.simplefilter("always")
                sampler.sample(logits.array, rows, allowed_mask=mask)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        said = [str(wait.message) for wait in waits]
        assert len(said) <= 1, f"{len(said)} waits for the GPU in one step of {asked}: {said}"
