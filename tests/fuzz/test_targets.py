"""Every target on every kept seed, on its examples, and on what hypothesis makes of them."""

import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.contract import SEEDS, load, names, plain, seeds

EXAMPLES = 100
INTERESTING = tuple(
    number.to_bytes(width, order, signed=number < 0)
    for width in (1, 2, 4, 8)
    for order in ("little", "big")
    for number in (0, 1, 2 ** (8 * width - 1) - 1, -1)
)
TOKENS = (b'"', b"{", b"}", b"[", b"]", b":", b",", b"\r\n", b"\0", b"\xff\xfe", b"null", b"1e999", b"\x1b")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What readers log of thousands of wrong inputs is not looked at here."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@st.composite
def mutations(draw: st.DrawFn, examples: tuple[bytes, ...]) -> bytes:
    """An example with a few places overwritten, cut, repeated, moved or joined with another."""
    data = bytearray(draw(st.sampled_from(examples))[:4096])
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        length = draw(st.integers(0, 24))
        piece = draw(st.one_of(st.sampled_from((*INTERESTING, *TOKENS)), st.binary(max_size=12)))
        match draw(st.integers(0, 5)):
            case 0:
                data[at : at + len(piece)] = piece
            case 1:
                data[at:at] = piece
            case 2:
                del data[at : at + length]
            case 3:
                data[at:at] = data[at : at + length] * draw(st.integers(1, 8))
            case 4:
                del data[at:]
            case _:
                data[at:] = draw(st.sampled_from(examples))[at:4096]
    return bytes(data)


@pytest.mark.parametrize("name", names())
def test_examples(name: str) -> None:
    for data in load(name).EXAMPLES:
        load(name).target(data)


@pytest.mark.parametrize("name", names())
def test_kept_seeds(name: str) -> None:
    for path in seeds(name):
        load(name).target(path.read_bytes())


@pytest.mark.parametrize("name", names())
def test_mutated_examples(name: str) -> None:
    target = load(name)
    inputs = st.one_of(mutations(tuple(target.EXAMPLES)), st.binary(max_size=300))

    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, print_blob=True,
        suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink],
    )  # fmt: skip
    @given(inputs)
    def run(data: bytes) -> None:
        target.target(data)

    run()


def test_seeds_are_small_and_belong_to_a_target() -> None:
    paths = [path for path in SEEDS.rglob("*") if path.is_file()]
    assert {path.parent.name for path in paths} <= set(names())
    assert max(path.stat().st_size for path in paths) <= 2048
    assert sum(path.stat().st_size for path in paths) <= 200 << 10
    for path in paths:
        assert path.stem == hashlib.sha256(path.read_bytes()).hexdigest()[:16], f"rename {path}"


@pytest.mark.parametrize("text", ["", "two\nlines", "\x1b[31m", "x" * 1001])
def test_what_is_not_plain_is_found(text: str) -> None:
    with pytest.raises(AssertionError):
        plain(ValueError(text))


def test_every_target_says_what_it_promises() -> None:
    folder = Path(__file__).with_name("targets")
    assert names() == sorted(path.stem for path in folder.glob("*.py"))
    assert all((load(name).__doc__ or "").strip() for name in names())
