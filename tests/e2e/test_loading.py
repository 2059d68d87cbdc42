"""What must not load is refused with one line, while the other models go on serving."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.deploy import publish
from scripts.errors import TritonError
from tests.e2e.asking import generate, stream, text_of
from tests.e2e.conftest import FACADE, MODEL, Triton, add_model, foreign_release, parameter


@pytest.fixture
def refused(triton: Triton) -> Iterator[str]:
    """Name of a model folder that goes away afterwards."""
    yield "refused"
    shutil.rmtree(triton.home.repository / "refused", ignore_errors=True)


def reason_of(triton: Triton, model: str) -> str:
    """Why it does not load; the demo keeps answering meanwhile."""
    with pytest.raises(TritonError) as raised:
        triton.http.load(model, limit_s=60)
    assert text_of(triton, text_input="The capital of France is", max_tokens=2)
    return str(raised.value)


def deployed(triton: Triton, model: str, small_release: Path, tmp_path: Path, *, config: str = "") -> Path:
    """The small model under a name of its own, signed and current; its release folder in the repository."""
    release = foreign_release(
        small_release, tmp_path / "release", private=triton.home.private_key, model=model
    )
    add_model(triton.home, model, config=config)
    digest = publish(model, release, repository=triton.home.repository, keys=(triton.home.public_key,))
    return triton.home.repository / model / "1" / "releases" / digest


def test_a_model_comes_and_goes(triton: Triton, refused: str, small_release: Path, tmp_path: Path) -> None:
    deployed(triton, refused, small_release, tmp_path)
    triton.http.load(refused, limit_s=60)
    status, body = generate(triton, model=refused, input_ids=[1, 2, 3], max_tokens=3)
    assert (status, body["num_output_tokens"]) == (200, 3)
    triton.http.unload(refused)


def test_an_unsigned_release_is_refused(
    triton: Triton, refused: str, small_release: Path, tmp_path: Path
) -> None:
    (deployed(triton, refused, small_release, tmp_path) / "model.sig").unlink()
    assert "signature: expected model.sig" in reason_of(triton, refused)


@pytest.mark.parametrize("name", ["weights.bin", "graph.onnx", "tokenizer.json", "engine.json"])
def test_an_altered_release_is_refused(
    triton: Triton, refused: str, small_release: Path, tmp_path: Path, name: str
) -> None:
    path = deployed(triton, refused, small_release, tmp_path) / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    reason = reason_of(triton, refused)
    assert "digest: expected SHA-256" in reason
    assert name in reason


def test_a_truncated_release_is_refused(
    triton: Triton, refused: str, small_release: Path, tmp_path: Path
) -> None:
    path = deployed(triton, refused, small_release, tmp_path) / "weights.bin"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    assert "weights.bin" in reason_of(triton, refused)


def test_a_release_for_another_model_is_refused(
    triton: Triton, refused: str, small_release: Path, tmp_path: Path
) -> None:
    deployed(triton, "other", small_release, tmp_path)
    add_model(triton.home, refused)
    shutil.rmtree(triton.home.repository / refused / "1")
    (triton.home.repository / "other" / "1").rename(triton.home.repository / refused / "1")
    shutil.rmtree(triton.home.repository / "other")
    assert "model: expected a release for 'refused', found one for 'other'" in reason_of(triton, refused)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (parameter("lanes", 0), ("lanes", "1", "0")),
        (parameter("lanes", "many"), ("lanes", "many")),
        (parameter("no_such_key", 1), ("no_such_key",)),
        (parameter("cache", "maybe"), ("cache", "maybe")),
        (parameter("facade_for", MODEL) + parameter("lanes", 8), ("lanes", "unknown key")),
        ("this is no protobuf text {", ("failed to load 'refused'",)),  # refused by Triton itself
        ("max_batch_size: 8\n", ("max_batch_size", "8")),
    ],
)
def test_a_malformed_configuration_is_refused(
    triton: Triton, refused: str, config: str, words: tuple[str, ...]
) -> None:
    add_model(triton.home, refused, config=config)
    reason = reason_of(triton, refused)
    assert all(word in reason for word in words), reason


@pytest.mark.parametrize("text", ["{", "{}", '{"format": "tensorcache-engine/9"}'])
def test_a_malformed_manifest_is_refused(
    triton: Triton, refused: str, small_release: Path, tmp_path: Path, text: str
) -> None:
    release = deployed(triton, refused, small_release, tmp_path)
    (release / "engine.json").write_text(text)
    assert "engine.json" in reason_of(triton, refused)


def test_no_release_at_all_is_said(triton: Triton, refused: str) -> None:
    add_model(triton.home, refused)
    assert "publish a release with `tensorcache deploy`" in reason_of(triton, refused)


def test_the_control_api_needs_the_key(triton: Triton) -> None:
    from scripts.triton_http import TritonHttp

    with pytest.raises(TritonError, match="403"):
        TritonHttp(triton.address).unload(MODEL)


def test_a_reloaded_model_is_warm(triton: Triton) -> None:
    prompt = " ".join(f"Chapter {number} tells of the sea." for number in range(40))
    before = stream(triton, text_input=prompt, max_tokens=8)
    triton.http.unload(MODEL)
    triton.http.load(MODEL, limit_s=120)
    after = stream(triton, text_input=prompt, max_tokens=8)
    assert after.text == before.text
    assert after.cached_tokens >= before.input_tokens - 34
    assert generate(triton, model=FACADE, text_input=prompt, max_tokens=2)[0] == 200
