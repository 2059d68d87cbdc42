"""The metrics page: the promised names are there and move with what happens."""

import re

from tests.e2e.asking import generate, stream
from tests.e2e.conftest import FACADE, LANES, MAX_SEQ_LEN, MODEL, Triton
from tests.waiting import wait_until

NAMES = {
    "requests_total": "counter",
    "input_tokens_total": "counter",
    "output_tokens_total": "counter",
    "cached_tokens_total": "counter",
    "ttft_seconds": "histogram",
    "tpot_seconds": "histogram",
    "requests_waiting": "gauge",
    "requests_running": "gauge",
    "queued_prefill_tokens": "gauge",
    "kv_tokens_used": "gauge",
    "kv_tokens_capacity": "gauge",
}


def test_names_types_and_labels(triton: Triton) -> None:
    stream(triton, text_input="Hello", max_tokens=3)
    wait_until(lambda: triton.metric("kv_tokens_capacity", model=MODEL) > 0)
    page = triton.http.metrics()
    kinds = dict(re.findall(r"^# TYPE tensorcache_(\w+) (\w+)$", page, re.MULTILINE))
    assert kinds.items() >= NAMES.items()
    for line in page.splitlines():
        if line.startswith("tensorcache_"):
            assert f'model="{MODEL}"' in line or 'model="' in line
            assert 'version="1"' in line


def test_values_move(triton: Triton) -> None:
    names = ("input_tokens_total", "output_tokens_total", "ttft_seconds_count", "tpot_seconds_count")
    before = {name: triton.metric(name, model=MODEL) for name in names}
    ended = triton.metric("requests_total", model=MODEL, reason="length")
    status, body = generate(triton, text_input="The capital of France is", max_tokens=6)
    assert status == 200
    wait_until(lambda: triton.metric("requests_total", model=MODEL, reason="length") == ended + 1)
    moved = {name: triton.metric(name, model=MODEL) - before[name] for name in names}
    assert moved == {
        "input_tokens_total": body["num_input_tokens"], "output_tokens_total": 6, "ttft_seconds_count": 1,
        "tpot_seconds_count": 1,
    }  # fmt: skip


def test_cached_tokens_are_counted(triton: Triton) -> None:
    prompt = " ".join(f"Lamp {number} shines." for number in range(60))
    stream(triton, text_input=prompt, max_tokens=1)
    before = triton.metric("cached_tokens_total", model=MODEL)
    answer = stream(triton, text_input=prompt, max_tokens=1)
    assert answer.cached_tokens > 200
    wait_until(lambda: triton.metric("cached_tokens_total", model=MODEL) >= before + answer.cached_tokens)


def test_capacity_is_that_of_all_lanes(triton: Triton) -> None:
    wait_until(lambda: triton.metric("kv_tokens_capacity", model=MODEL) >= LANES * MAX_SEQ_LEN)


def test_refusals_are_counted_and_probes_are_not(triton: Triton) -> None:
    def refused() -> float:
        return triton.metric("requests_refused_total", model=MODEL, reason="InvalidRequest")

    before, ended = refused(), triton.metric("requests_total", model=MODEL)
    assert triton.http.probe(MODEL).alive
    assert triton.http.probe(FACADE).alive
    assert generate(triton, text_input="a", max_tokens=-1)[0] == 400
    wait_until(lambda: refused() == before + 1)
    assert triton.metric("requests_total", model=MODEL) == ended + 1
