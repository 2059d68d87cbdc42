"""Releases change under load, twenty times in a row: nobody fails, and every answer is one release's."""

import itertools
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from engines import TrustSettings, sign_release
from engines.build import BuildOptions, build_release
from engines.decoder import Decoder
from engines.loading import load_release_dir
from scripts.streamed_answer import StreamedAnswer
from tests.e2e.asking import stream
from tests.e2e.conftest import Triton, add_model, parameter
from tests.engines.random_decoder import random_decoder
from tests.waiting import wait_until

MODEL = "swapped"
SMALL = BuildOptions(precision="int8", lanes=8, max_seq_len=250, block_tokens=16, max_prefill_tokens=128)
SWAPS = 20
CORRUPT_AT, OTHER_AT = 7, 13
PER_SECOND = 20
FEW = 6
ASKERS = 8
PROMPTS = [list(range(start, start + 40)) for start in (5, 90, 200)]
DIGITS = 16


@dataclass(frozen=True)
class Shelf:
    """Releases in the model's version folder, by name: `even` and `odd` share their weights."""

    version: Path
    digests: dict[str, str]

    def point(self, name: str) -> str:
        """Make it the current one; the first digits of its digest."""
        digest = self.digests[name]
        beside = self.version / ".current"
        beside.write_text(digest + "\n")
        os.replace(beside, self.version / "current")
        return digest[:DIGITS]


@pytest.fixture
def shelf(triton: Triton, small_decoder: Decoder, tmp_path: Path) -> Iterator[Shelf]:
    """The model, loaded and on release `even`; gone afterwards."""
    add_model(triton.home, MODEL, config=parameter("swap_poll_s", 0.1) + parameter("threads", 1))
    version = triton.home.repository / MODEL / "1"
    weights = {
        "even": small_decoder,
        "odd": small_decoder,
        "other": random_decoder(seed=2),
        "bad": small_decoder,
    }
    trust, digests = TrustSettings(keys=(triton.home.public_key,)), {}
    for number, (name, decoder) in enumerate(weights.items(), start=1):
        built = build_release(decoder, tmp_path / name, model=MODEL, release=number, options=SMALL)
        sign_release(built, triton.home.private_key)
        digests[name] = load_release_dir(built, model=MODEL, trust=trust).digest
        shutil.copytree(built, version / "releases" / digests[name])
    path = version / "releases" / digests["bad"] / "weights.bin"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    made = Shelf(version, digests)
    made.point("even")
    triton.http.load(MODEL, limit_s=60)
    yield made
    triton.http.unload(MODEL)
    shutil.rmtree(triton.home.repository / MODEL)


def ask(triton: Triton, number: int) -> StreamedAnswer:
    return stream(
        triton, model=MODEL, input_ids=PROMPTS[number % len(PROMPTS)], max_tokens=24, ignore_eos=True
    )


def swap(triton: Triton, shelf: Shelf, name: str) -> None:
    """Point there, and wait for an answer that names it."""
    digits = shelf.point(name)
    wait_until(lambda: ask(triton, 0).release == digits, limit_s=60)


def texts_of(triton: Triton) -> list[str]:
    return [ask(triton, number).text for number in range(len(PROMPTS))]


class Load:
    """Asks at a steady rate until told to stop; late answers do not slow the rate while askers are free."""

    def __init__(self, triton: Triton) -> None:
        self._triton = triton
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(ASKERS)
        self._asked: list[Future[StreamedAnswer]] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Load":
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._stop.set()
        self._thread.join(timeout=10)
        self._pool.shutdown()

    def some_more(self) -> None:
        """Wait for a few answers to requests that begin now."""
        first = len(self._asked)
        wait_until(lambda: sum(asked.done() for asked in self._asked[first:]) >= FEW)

    def answers(self) -> list[StreamedAnswer]:
        """All of them; raises what any of them raised."""
        return [asked.result(timeout=60) for asked in self._asked]

    def _run(self) -> None:
        for number in itertools.count():
            if self._stop.wait(1 / PER_SECOND):
                return
            self._asked.append(self._pool.submit(ask, self._triton, number))


def test_twenty_swaps_under_load_fail_nobody(triton: Triton, shelf: Shelf) -> None:
    wanted = {"even": texts_of(triton)}
    swap(triton, shelf, "other")
    wanted["other"] = texts_of(triton)
    assert not set(wanted["even"]) & set(wanted["other"])
    swap(triton, shelf, "even")
    wanted["odd"] = wanted["even"]
    before = triton.metric("swaps_total", model=MODEL, reason="ok")
    with Load(triton) as load:
        serving = "even"
        for turn in range(SWAPS):
            if turn == CORRUPT_AT:
                shelf.point("bad")
                wait_until(lambda: triton.metric("swap_refusals_total", model=MODEL, reason="digest") == 1)
                continue
            serving = "other" if turn == OTHER_AT else "odd" if serving == "even" else "even"
            swap(triton, shelf, serving)
            load.some_more()
    answers = load.answers()
    names = {digest[:DIGITS]: name for name, digest in shelf.digests.items()}
    said = [(names[answer.release], answer.text) for answer in answers]
    wrong = [
        number for number, (name, text) in enumerate(said) if text != wanted[name][number % len(PROMPTS)]
    ]
    assert wrong == []
    assert {name for name, _ in said} == {"even", "odd", "other"}
    wait_until(lambda: triton.metric("swaps_total", model=MODEL, reason="ok") - before == SWAPS - 1)
    assert len(answers) >= FEW * (SWAPS - 1)


def test_a_stream_that_runs_goes_on_through_a_swap(triton: Triton, shelf: Shelf) -> None:
    prompt = {"model": MODEL, "input_ids": PROMPTS[1], "max_tokens": 200, "ignore_eos": True}
    alone = stream(triton, **prompt)
    stop, answers = threading.Event(), []

    def keep_asking() -> None:
        while not stop.is_set():
            answers.append(stream(triton, **prompt))

    asker = threading.Thread(target=keep_asking)
    asker.start()
    try:
        for name in ("odd", "even", "odd"):
            swap(triton, shelf, name)
    finally:
        stop.set()
        asker.join(timeout=60)
    assert {answer.text for answer in answers} == {alone.text}


def test_triton_reloads_what_was_swapped(triton: Triton, shelf: Shelf) -> None:
    swap(triton, shelf, "other")
    texts = texts_of(triton)
    triton.http.unload(MODEL)
    triton.http.load(MODEL, limit_s=60)
    assert texts_of(triton) == texts
    assert ask(triton, 0).release == shelf.digests["other"][:DIGITS]
