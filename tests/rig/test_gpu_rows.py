"""What a GPU node's tests and bench do apart from the GPU itself: they build, load, run and give every row.

No value that is measured on the rig means anything; that each row gets one does.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engines.decoder import Decoder, weight_shapes
from engines.errors import DeviceError
from scripts.bench import goals, gpu, gpu_llama, gpu_ready, gpu_subject, harness
from tests.engines.random_decoder import random_decoder
from tests.gpu import checks, twenty_steps
from tests.gpu.node import Node, memory_in_use
from tests.rig.plugin import Rig

LITTLE = gpu.Effort(rounds=1, steps=1, imported=1)


@pytest.fixture(scope="module")
def node(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    made = Node(tmp_path_factory.mktemp("node"), random_decoder)
    made.reference("float16")  # before the rig is plugged in: torch looks for a tensorrt of its own
    request.getfixturevalue("module_rig")
    yield made
    made.close()


def test_a_node_builds_signs_loads_and_opens(node: Node) -> None:
    engine = node.engine("float16")
    assert engine is node.engine("float16")
    assert engine.spec.positions == engine.spec.max_seq_len + 1
    assert checks.logits_match_torch(engine, node.reference("float16"))


def test_memory_in_use_is_that_of_device_and_process(node: Node) -> None:
    before = memory_in_use()
    engine = node.open("bfloat16")
    during = memory_in_use()
    engine.close()
    pool = engine.spec.lanes * engine.spec.block_nbytes * (engine.spec.positions // engine.spec.block_tokens)
    assert during["device"] - before["device"] >= pool
    assert memory_in_use()["device"] == before["device"]
    assert before["host"] > 10 << 20


def test_the_twenty_steps_for_the_sanitizer_run(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    twenty_steps.main(str(node.release("float16")), str(node.public_key))
    assert capsys.readouterr().out.endswith("twenty steps done\n")


def test_every_row_of_the_gpu_room_gets_a_value(module_rig: Rig, tmp_path: Path) -> None:
    subject = gpu_subject.GpuSubject(
        tmp_path, decoders={"smollm2": random_decoder, "llama8b": lambda: random_decoder(seed=2)}
    )
    how = gpu.How(subject, wait=lambda logits: np.asarray(logits.array), effort=LITTLE)
    rows = harness.run(gpu.measurements(how), lambda row: None)
    assert [row.name for row in rows if row.value is None] == []
    assert sorted(row.name for row in rows) == sorted(goals.names_of("gpu"))


def test_the_large_engine_can_be_left_out(tmp_path: Path) -> None:
    how = gpu.How(gpu_subject.GpuSubject(tmp_path, with_8b=False))
    large = [made for made in gpu.measurements(how) if "llama8b" in made.rows[0]]
    rows = harness.run(large, lambda row: None)
    assert len(rows) == 3
    assert {(row.met, row.detail) for row in rows} == {(None, "left out (--without-8b)")}


def test_a_large_engine_that_does_not_fit_is_refused_with_its_needs(
    module_rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_subject, "available_bytes", lambda: 8 << 30)
    with pytest.raises(RuntimeError, match=r"8B-shaped engine needs \d+ GiB, free are \d+ GiB"):
        gpu_subject.GpuSubject(tmp_path).release_folder("llama8b")
    assert "GiB of disk" in capsys.readouterr().out


# -- the random decoder of Llama-3-8B's shape --


def small_llama() -> Decoder:
    decoder = random_decoder(tied=False)
    return gpu_llama.random_llama(decoder.tokenizer_json, decoder.config)


def test_random_weights_are_the_same_at_every_call_and_of_unit_gain() -> None:
    decoder = small_llama()
    assert set(decoder.weights) == set(weight_shapes(decoder.config))
    first, again = decoder.weights["layers.0.up"], decoder.weights["layers.0.up"]
    assert first is not again
    assert np.array_equal(first, again)
    assert not np.array_equal(first, decoder.weights["layers.1.up"])
    assert first.std() * np.sqrt(first.shape[1]) == pytest.approx(1.0, rel=0.05)
    assert np.array_equal(decoder.weights["norm"], np.ones(decoder.config.geometry.hidden, np.float32))


def test_the_shape_is_that_of_llama_3_8b() -> None:
    assert gpu_llama.weight_count() == 8_030_261_248


# -- readiness --


def test_readiness_names_the_card_and_the_first_missing_library(module_rig: Rig) -> None:
    assert gpu_ready.require_card().line.startswith("Stand-in GPU (2 GiB, compute capability 8.0)")

    def without_cuda(name: str) -> object:
        class Torch:
            __version__ = "2.13.0+cpu"

            class cuda:  # noqa: N801  # torch's own name
                @staticmethod
                def is_available() -> bool:
                    return False

        return Torch

    with pytest.raises(
        DeviceError, match=r"torch: expected one that sees this GPU, found 2\.13\.0\+cpu: .*gpu-cu13"
    ):
        gpu_ready.require(without_cuda)

    def missing(name: str) -> object:
        raise ImportError(f"No module named {name!r}")

    with pytest.raises(DeviceError, match="cuda-bindings: expected its Python package, found none"):
        gpu_ready.require(missing)
