"""The tensorrt double refuses and complains where TensorRT would: a step through it by hand, each mistake."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from engines.cuda import Device, open_device
from engines.decoder import Decoder
from tests.rig import plans
from tests.rig.plans import make_plan
from tests.rig.plugin import Rig

POSITIONS, LANES, CHUNK = 64, 4, 16


class Hand:
    """A context of the prefill profile, bound and shaped for a prefill of five tokens."""

    def __init__(self, device: Device, decoder: Decoder, parts: ExitStack) -> None:
        import tensorrt as trt

        class Logger(trt.ILogger):  # type: ignore[misc]
            def __init__(self) -> None:
                trt.ILogger.__init__(self)
                self.kept: list[str] = []

            def log(self, severity: Any, msg: str) -> None:
                self.kept.append(msg)

        self.logger = Logger()
        self.g = decoder.config.geometry
        self.plan = make_plan(decoder, positions=POSITIONS, lanes=LANES, chunk=CHUNK)
        self.engine = trt.Runtime(self.logger).deserialize_cuda_engine(memoryview(self.plan))
        self.strategy = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        self.context = self.engine.create_execution_context(self.strategy)
        self.stream = device.stream()
        parts.callback(self.stream.close)
        self.activations = device.allocate(self.engine.get_device_memory_size_for_profile_v2(0))
        self.lane = self.g.kv_heads * POSITIONS * self.g.head_dim * 2
        self.pool = device.allocate_zeroed(2 * self.g.layers * self.lane, self.stream)
        self.inputs = device.allocate(5 * 1024)
        self.logits = device.allocate(self.g.vocab_size * 4)
        for memory in (self.activations, self.pool, self.inputs, self.logits):
            parts.callback(memory.free)
        self.context.set_device_memory(self.activations.address, self.activations.nbytes)
        assert self.context.set_optimization_profile_async(0, self.stream.handle)
        self.load("input_ids", np.arange(1, 6).reshape(1, 5))
        self.load("position_ids", np.arange(5).reshape(1, 5))
        self.load("write_indices", np.zeros(1, np.int64))
        self.load("kv_positions", np.arange(POSITIONS))
        self.load("logit_indices", np.full((1, 1), 4))
        for index in range(2 * self.g.layers):
            name = f"{('key', 'value')[index % 2]}_{index // 2}"
            for when in ("past", "present"):
                assert self.context.set_tensor_address(
                    f"{when}_{name}", self.pool.address + index * self.lane
                )
            self.context.set_input_shape(f"past_{name}", (1, self.g.kv_heads, POSITIONS, self.g.head_dim))
        self.context.set_tensor_address("logits", self.logits.address)

    def load(self, name: str, values: Any) -> None:
        names = ("input_ids", "position_ids", "write_indices", "kv_positions", "logit_indices")
        address = self.inputs.address + 1024 * names.index(name)
        self.stream.upload(address, np.ascontiguousarray(values))
        self.context.set_tensor_address(name, address)
        assert self.context.set_input_shape(name, np.shape(values)), self.logger.kept

    def run(self) -> Any:
        if not self.context.execute_async_v3(self.stream.handle):
            return self.logger.kept[-1]
        out = np.zeros(self.g.vocab_size, np.float32)
        self.stream.download(out, self.logits.address)
        return out


@pytest.fixture
def hand(rig: Rig, small_decoder: Decoder) -> Iterator[Hand]:
    device = open_device(0)
    with device.current(), ExitStack() as parts:
        made = Hand(device, small_decoder, parts)
        yield made
        made.context = made.engine = None


def test_a_step_by_hand_runs(hand: Hand) -> None:
    first = hand.run()
    assert np.isfinite(first).all()
    assert np.ptp(first) > 1
    assert np.array_equal(hand.run(), first)


def foreign_address(hand: Hand) -> None:
    hand.context.set_tensor_address("logits", 256 * 1000)


def too_little_room(hand: Hand) -> None:
    hand.context.set_tensor_address("logits", hand.logits.address + 256)


def output_elsewhere(hand: Hand) -> None:
    hand.context.set_tensor_address("present_key_0", hand.pool.address + hand.lane)


def contradicting_shapes(hand: Hand) -> None:
    hand.context.set_input_shape("position_ids", (1, 4))


def another_profile(hand: Hand) -> None:
    hand.context.set_optimization_profile_async(1, hand.stream.handle)


def too_few_activations(hand: Hand) -> None:
    hand.context.set_device_memory(hand.activations.address, 256)


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (output_elsewhere, "present_key_0 is not where past_key_0 is"),
        (contradicting_shapes, "shapes contradict each other"),
        (another_profile, "no shape was set for"),
        (too_few_activations, "too little device memory"),
    ],
)
def test_a_step_is_refused_with_a_reason(hand: Hand, mistake: Callable[[Hand], None], words: str) -> None:
    mistake(hand)
    assert words in hand.run()


def write_past_the_end(hand: Hand) -> None:
    hand.load("write_indices", np.full(1, POSITIONS - 4))


def logits_in_activations(hand: Hand) -> None:
    hand.context.set_tensor_address("logits", hand.activations.address)


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (foreign_address, "logits: 1280 bytes at 0x3e800"),
        (too_little_room, "logits: 1280 bytes at"),
        (write_past_the_end, "writes up to 65 of 64 positions"),
        (logits_in_activations, "logits lies in the activations"),
    ],
)
def test_a_step_that_would_fault_fails_the_device(
    rig: Rig, hand: Hand, mistake: Callable[[Hand], None], words: str
) -> None:
    import pycuda.driver as cuda

    mistake(hand)
    with pytest.raises(cuda.LaunchError):
        hand.run()
    assert words in rig.gpu.take_complaints()[0]
    rig.gpu.forgive()


def test_shapes_are_held_to_the_profile(hand: Hand) -> None:
    set_shape = hand.context.set_input_shape
    assert not set_shape("input_ids", (1, CHUNK + 1))
    assert not set_shape("input_ids", (2, 1))
    assert not set_shape("kv_positions", (POSITIONS + 1,))
    assert not set_shape("input_ids", (5,))
    assert not set_shape("logits", (1, 1, 320))
    assert not hand.context.set_tensor_address("logits", hand.logits.address + 8)
    assert not hand.context.set_tensor_address("unknown", hand.logits.address)
    assert len(hand.logger.kept) == 7


def test_a_profile_belongs_to_one_context(hand: Hand) -> None:
    other = hand.engine.create_execution_context(hand.strategy)
    choose = other.set_optimization_profile_async
    for taken_or_unknown in (0, 2):
        with pytest.raises(RuntimeError, match="set optimization profile"):
            choose(taken_or_unknown, hand.stream.handle)
    assert choose(1, hand.stream.handle)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda plan: plan[:-1], "bytes expected"),
        (lambda plan: b"x" + plan[1:], "Magic tag mismatch"),
        (lambda plan: b"", "Magic tag mismatch"),
        (lambda plan: plan[:24] + b"\x01" + plan[25:], "not compatible with this version"),
        (lambda plan: plan[:32] + b"\xff" * 64 + plan[96:], "Deserialization failed"),
    ],
)
def test_a_bad_plan_gives_none_and_a_message(
    hand: Hand, damage: Callable[[bytes], bytes], words: str
) -> None:
    import tensorrt as trt

    assert trt.Runtime(hand.logger).deserialize_cuda_engine(memoryview(damage(hand.plan))) is None
    assert words in hand.logger.kept[-1]


def test_a_plan_holds_what_was_packed(hand: Hand) -> None:
    content = plans.unpack(memoryview(hand.plan))
    assert isinstance(content, plans.Content)
    assert content.profiles[0]["input_ids"] == ((1, 1), (1, 8), (1, 16))
    assert content.profiles[1]["input_ids"] == ((1, 1), (4, 1), (4, 1))
    assert plans.changed(memoryview(hand.plan), lambda graph: graph) == hand.plan
