"""Opening: from verified bytes to a warm engine that answered its golden token, or a refusal."""

import logging
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest

from engines import opening
from engines.contract import LaneId, Logits
from engines.driver import require_driver
from engines.errors import DeviceError, ReleaseError, StepError
from engines.loading import VerifiedRelease, load_release_dir
from engines.manifest import Golden, TensorRTInfo, parse_manifest
from engines.opening import open_engine
from engines.options import EngineOptions
from engines.ort import OrtEngine
from tests.engines.conftest import Keys

WriteRelease = Callable[..., Path]
OPTIONS = EngineOptions(threads=1, lanes=2)


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[OrtEngine]:
    """Every engine that is closed while the test runs."""
    seen: list[OrtEngine] = []
    close = OrtEngine.close

    def record(engine: OrtEngine) -> None:
        seen.append(engine)
        close(engine)

    monkeypatch.setattr(OrtEngine, "close", record)
    return seen


def refused(release: VerifiedRelease, options: EngineOptions = OPTIONS) -> ReleaseError:
    with pytest.raises(ReleaseError) as caught:
        open_engine(release, options)
    assert "\n" not in str(caught.value)
    return caught.value


def greedy(engine: Any, golden: Golden) -> int:
    logits = engine.prefill(LaneId(1), np.array(golden.prompt, np.int64), 0)
    return int(np.argmax(logits.array[0]))


def test_a_release_opens_and_answers(
    small_release: Path, resign: Any, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    release = load_release_dir(resign(small_release), model="small", trust=keys.trust)
    with caplog.at_level(logging.INFO, logger=opening.__name__):
        engine = open_engine(release, OPTIONS)
    try:
        assert engine.spec.digest == release.digest
        assert (engine.spec.model, engine.spec.release, engine.spec.lanes) == ("small", 1, 2)
        assert greedy(engine, release.manifest.golden) == release.manifest.golden.token
    finally:
        engine.close()
    assert f"model=small release=1 digest={release.digest[:16]}" in caplog.text


def test_the_demo_release_opens_and_answers(demo_release: Path, resign: Any, keys: Keys) -> None:
    release = load_release_dir(resign(demo_release), model="smollm2", trust=keys.trust)
    golden = release.manifest.golden
    engine = open_engine(release, EngineOptions(threads=2, lanes=2, max_seq_len=512))
    try:
        assert engine.spec.positions == 544
        assert greedy(engine, golden) == golden.token
    finally:
        engine.close()


def test_an_engine_keeps_working_after_the_release_was_dropped(
    small_release: Path, resign: Any, keys: Keys
) -> None:
    release = load_release_dir(resign(small_release), trust=keys.trust)
    golden = release.manifest.golden
    engine = open_engine(release, OPTIONS)
    del release
    ballast = [np.full(1 << 20, 255, np.uint8) for _ in range(32)]  # reuses memory that was freed
    try:
        assert greedy(engine, golden) == golden.token
    finally:
        engine.close()
    assert len(ballast) == 32


def test_another_answer_than_the_golden_token_is_refused(
    demo_release: Path, resign: Any, keys: Keys, closed: list[OrtEngine]
) -> None:
    golden = parse_manifest((demo_release / "engine.json").read_bytes()).golden
    wrong = msgspec.structs.replace(golden, token=golden.token + 1)
    release = load_release_dir(resign(demo_release, golden=wrong), trust=keys.trust)
    error = refused(release, EngineOptions(threads=2, lanes=1, max_seq_len=512))
    assert error.step == "golden"
    assert error.expected == f"token {golden.token + 1} after the golden prompt, by prefill"
    assert error.found == f"token {golden.token}"
    assert len(closed) == 1


def test_altered_weights_that_somebody_signed_fail_the_golden_token(
    small_release: Path, resign: Any, keys: Keys, closed: list[OrtEngine]
) -> None:
    (weights,) = small_release.glob("*.bin")
    data = np.frombuffer(weights.read_bytes(), np.uint8)
    release = load_release_dir(
        resign(small_release, replace={weights.name: data[::-1].tobytes()}), trust=keys.trust
    )
    assert refused(release).step == "golden"
    assert len(closed) == 1


def _without_output(model: onnx.ModelProto) -> None:
    del model.graph.output[-1]


def _without_input(model: onnx.ModelProto) -> None:
    del model.graph.input[-1]


def _renamed_output(model: onnx.ModelProto) -> None:
    old, new = model.graph.output[0].name, "scores"
    for node in model.graph.node:
        node.output[:] = [new if name == old else name for name in node.output]
    model.graph.output[0].name = new


def _narrower_logits(model: onnx.ModelProto) -> None:
    model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT16


@pytest.mark.parametrize(
    ("change", "steps"),
    [
        (_without_output, {"contract"}),
        (_renamed_output, {"contract"}),
        (_without_input, {"contract", "deserialise"}),
        (_narrower_logits, {"contract", "deserialise"}),
    ],
)
def test_a_graph_that_breaks_the_contract_is_refused(
    small_release: Path, resign: Any, keys: Keys, change: Callable[[onnx.ModelProto], None], steps: set[str]
) -> None:
    graph = parse_manifest((small_release / "engine.json").read_bytes()).graph
    model = onnx.load_model_from_string((small_release / graph).read_bytes())
    change(model)
    release = load_release_dir(
        resign(small_release, replace={graph: model.SerializeToString()}), trust=keys.trust
    )
    assert refused(release).step in steps


def test_a_demo_graph_without_an_output_is_refused(demo_release: Path, resign: Any, keys: Keys) -> None:
    graph = parse_manifest((demo_release / "engine.json").read_bytes()).graph
    model = onnx.load_model_from_string((demo_release / graph).read_bytes())
    name = model.graph.output[-1].name
    _without_output(model)
    release = load_release_dir(
        resign(demo_release, replace={graph: model.SerializeToString()}), trust=keys.trust
    )
    error = refused(release, EngineOptions(threads=2, lanes=1, max_seq_len=512))
    assert error.step == "contract"
    assert name in error.expected
    assert error.found == "none"


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\n", b"\x08\x0a"], ids=["empty", "png", "cut"])
def test_a_graph_that_is_none_is_refused(
    small_release: Path, resign: Any, keys: Keys, content: bytes
) -> None:
    graph = parse_manifest((small_release / "engine.json").read_bytes()).graph
    release = load_release_dir(resign(small_release, replace={graph: content}), trust=keys.trust)
    assert refused(release).step in {"deserialise", "contract"}


@pytest.mark.parametrize(
    "prompt", [(), (1, -1), (1, 10**6), tuple(range(16)) * 20], ids=["empty", "negative", "beyond", "long"]
)
def test_a_golden_prompt_that_no_lane_can_hold_is_refused(
    small_release: Path, resign: Any, keys: Keys, closed: list[OrtEngine], prompt: tuple[int, ...]
) -> None:
    release = load_release_dir(resign(small_release, golden=Golden(prompt, 1, 1.0)), trust=keys.trust)
    assert refused(release).step == "golden"
    assert len(closed) == 1


def test_a_golden_prompt_longer_than_one_prefill_is_split(
    small_release: Path, resign: Any, keys: Keys
) -> None:
    golden = parse_manifest((small_release / "engine.json").read_bytes()).golden
    release = load_release_dir(resign(small_release, max_prefill_tokens=2), trust=keys.trust)
    assert len(golden.prompt) > 2
    engine = open_engine(release, OPTIONS)
    assert engine.spec.max_prefill_tokens == 2
    engine.close()


class _BrokenDecode:
    """Makes the engine's decode answer something else: only the second half of the golden check sees it."""

    def __init__(self, outcome: Callable[[Logits], Logits]) -> None:
        self._outcome = outcome
        self._decode = OrtEngine.decode

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        decode, outcome = self._decode, self._outcome

        def broken(engine: OrtEngine, lanes: Sequence[LaneId], tokens: Any, positions: Any) -> Logits:
            return outcome(decode(engine, lanes, tokens, positions))

        monkeypatch.setattr(OrtEngine, "decode", broken)


def _not_finite(logits: Logits) -> Logits:
    return Logits(np.full_like(logits.array, np.nan))


def _reversed(logits: Logits) -> Logits:
    return Logits(logits.array[:, ::-1])


@pytest.mark.parametrize(("outcome", "found"), [(_not_finite, "not finite"), (_reversed, "token")])
def test_a_decode_that_disagrees_with_the_prefill_is_refused(
    small_release: Path,
    resign: Any,
    keys: Keys,
    closed: list[OrtEngine],
    monkeypatch: pytest.MonkeyPatch,
    outcome: Callable[[Logits], Logits],
    found: str,
) -> None:
    release = load_release_dir(resign(small_release), trust=keys.trust)
    _BrokenDecode(outcome).install(monkeypatch)
    error = refused(release)
    assert error.step == "golden"
    assert error.expected.endswith("by decode")
    assert found in error.found
    assert len(closed) == 1


def test_a_step_that_fails_while_opening_closes_the_engine(
    small_release: Path, resign: Any, keys: Keys, closed: list[OrtEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    release = load_release_dir(resign(small_release), trust=keys.trust)

    def fail(*_: Any) -> Logits:
        raise StepError("out of order")

    monkeypatch.setattr(OrtEngine, "prewarm", lambda engine: iter(()))
    monkeypatch.setattr(OrtEngine, "prefill", fail)
    error = refused(release)
    assert error.step == "golden"
    assert "out of order" in error.found
    monkeypatch.setattr(OrtEngine, "prewarm", fail)
    with pytest.raises(StepError):
        open_engine(release, OPTIONS)
    assert len(closed) == 2


def test_a_plan_without_a_driver_says_what_to_install(
    write_release: WriteRelease, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_library(name: str) -> object:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(
        "engines.driver.require_driver", lambda at: require_driver(at, open_library=no_library)
    )
    info = TensorRTInfo(version="10.15.1", compute_capability="8.0", gpu_name="any", profiles=())
    release = load_release_dir(write_release(runtime="tensorrt", tensorrt=info), trust=keys.trust)
    with pytest.raises(DeviceError, match="install the driver on this machine") as caught:
        open_engine(release, EngineOptions())
    assert "install the extra gpu-cu13" in str(caught.value)


def test_too_little_memory_is_refused_before_the_runtime_starts(
    small_release: Path, resign: Any, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    release = load_release_dir(resign(small_release), trust=keys.trust)
    needs = []
    for lanes in (1, 3):
        with pytest.raises(ReleaseError, match=r"^memory: .*\(fewer lanes") as caught:
            open_engine(release, EngineOptions(threads=1, lanes=lanes), available=lambda: 1000)
        needs.append(int(caught.value.expected.split()[0]))
        assert f"release={release.manifest.release} need={needs[-1]} free=1000" in caplog.text
    spec = release.manifest
    position = 2 * spec.geometry.layers * spec.geometry.kv_heads * spec.geometry.head_dim * 4
    assert needs[1] - needs[0] == pytest.approx(2 * 256 * position, rel=0.1)  # two lanes of 256 positions


FACE = """
import sys, engines
heavy = {"onnx", "onnxruntime", "gguf", "torch", "safetensors", "tokenizers", "model_signing", "tensorrt"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
for name in engines.__all__:
    getattr(engines, name)
assert "engines.build" in sys.modules
try:
    engines.nothing
except AttributeError as error:
    assert "nothing" in str(error)
else:
    raise SystemExit("no AttributeError")
"""


def test_the_face_of_engines_is_light_and_complete() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FACE], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert (done.returncode, done.stderr) == (0, "")
