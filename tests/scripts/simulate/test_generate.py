"""Made-up traffic: the same from the same seed, well-formed, and of the shape it is named for."""

import json
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from scripts.simulate.generate import KINDS, generate
from scripts.simulate.generate.draws import Draws, Zipf
from scripts.simulate.generate.prompt import BLOCK_TOKENS, Prompt
from scripts.simulate.trace_file import Request, trace_of

ROOT = Path(__file__).resolve().parents[3]


def some(kind: str, seed: int = 3, count: int = 600) -> list[Request]:
    return list(generate(kind, seed=seed, requests=count))


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_same_bytes(kind: str, tmp_path: Path) -> None:
    """In another process, whose hashes differ, too."""
    words = ["simulate", "--generate", kind, "--requests", "200", "--out"]
    made = []
    for number in range(2):
        path = tmp_path / str(number)
        code = f"from scripts.cli import main; main({[*words, str(path)]!r})"
        subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60, capture_output=True)
        made.append(path.read_bytes())
    assert made[0] == made[1]
    assert made[0].count(b"\n") == 200
    assert some(kind, seed=3) != some(kind, seed=4)


@pytest.mark.parametrize("kind", KINDS)
def test_requests_are_well_formed(kind: str) -> None:
    requests = some(kind)
    assert len(requests) == 600
    assert all(earlier.timestamp <= later.timestamp for earlier, later in pairwise(requests))
    for request in requests:
        assert len(request.hash_ids) == -(-request.input_length // BLOCK_TOKENS)
        assert request.output_length > 0
        assert json.loads(json.dumps(request.timestamp)) == request.timestamp
    assert trace_of(kind, requests).foreign == 0


def test_zipf_has_popular_documents() -> None:
    documents = Counter(
        request.hash_ids[0] for request in some("zipf", count=3000) if len(request.hash_ids) > 3
    )
    counts = sorted(documents.values(), reverse=True)
    assert counts[0] > 10 * counts[len(counts) // 2]
    assert len(counts) > 300


def test_chat_grows_by_whole_turns() -> None:
    """A later prompt of a conversation begins with all whole blocks of the one before."""
    requests = some("chat", count=2000)
    latest: dict[int, Request] = {}
    grown = 0
    for request in requests:
        whole = request.hash_ids[: request.input_length // BLOCK_TOKENS]
        before = next((latest[block] for block in reversed(whole) if block in latest), None)
        if before is not None:
            begun = before.hash_ids[: before.input_length // BLOCK_TOKENS]
            if whole[: len(begun)] == begun:
                grown += 1
                assert request.input_length > before.input_length
        if whole:
            latest[whole[-1]] = request
    assert grown > 600


def test_agents_share_long_beginnings_and_branch() -> None:
    requests = some("agent", count=2000)
    assert len({request.hash_ids[0] for request in requests}) <= 12
    assert sum(len(request.hash_ids) > 20 for request in requests) > 1500
    followers: dict[int, set[int]] = {}
    for request in requests:
        for block, after in pairwise(request.hash_ids):
            followers.setdefault(block, set()).add(after)
    assert sum(len(after) > 1 for after in followers.values()) > 50


def test_a_prompt_keeps_whole_blocks() -> None:
    ids = iter(range(100))
    prompt = Prompt(ids).grow(700)
    assert prompt.chain == [0, 1]
    other = prompt.fork()
    assert prompt.grow(400).chain == [0, 2, 3]
    assert other.grow(324).chain == [0, 4]
    assert other.tokens == 2 * BLOCK_TOKENS


def test_draws_have_their_shapes() -> None:
    draws = Draws(1)
    waits = [draws.exponential(3.0) for _ in range(4000)]
    assert sum(waits) / len(waits) == pytest.approx(3.0, rel=0.1)
    sizes = sorted(draws.lognormal(100.0, 1.0) for _ in range(4000))
    assert sizes[2000] == pytest.approx(100.0, rel=0.1)
    assert sizes[int(4000 * 0.841)] == pytest.approx(271.8, rel=0.15)
    ranks = Counter(Zipf(draws, 100, exponent=1.0).rank() for _ in range(8000))
    assert ranks[0] == pytest.approx(2 * ranks[1], rel=0.25)
    assert {draws.below(3) for _ in range(100)} == {0, 1, 2}
    assert draws.tokens(1.0, 9.0, most=5) <= 5
