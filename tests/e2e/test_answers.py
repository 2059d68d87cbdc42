"""Every way to ask gives the same text, with all outputs, and a prefix seen once is not computed again."""

import json
import re
import secrets
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tokenizers import Tokenizer

from scripts.client_examples import client_examples
from scripts.triton_stream import tensor
from tests.e2e.asking import all_at_once, events, generate, stream, text_of
from tests.e2e.conftest import FACADE, LANES, MODEL, Triton

PROMPT = "The capital of France is"
LONG = " ".join(f"Item {number} of the list is a lamp of kind {number % 7}." for number in range(30))
TEMPLATED = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
)
CHAT = json.dumps([{"role": "user", "content": "What is the capital of France?"}])


def test_generate_gives_every_output(triton: Triton) -> None:
    status, body = generate(triton, text_input=PROMPT, max_tokens=8, return_logprobs=True)
    assert status == 200, body
    assert body["text_output"]
    assert len(body["output_ids"]) == body["num_output_tokens"] == 8
    assert body["finish_reason"] == "length"
    assert body["num_input_tokens"] == 5
    assert body["num_cached_tokens"] >= 0
    assert len(body["logprobs"]) == 8
    assert all(value <= 0 for value in body["logprobs"])
    assert body["release"]


def test_stream_over_http_joins_to_the_whole_text(triton: Triton) -> None:
    whole = text_of(triton, text_input=PROMPT, max_tokens=24)
    parts = list(events(triton, text_input=PROMPT, max_tokens=24, stream=True))
    assert len(parts) > 3
    assert "".join(part["text_output"] for part in parts) == whole
    assert parts[-1]["finish_reason"] == "length"
    assert sum(part["num_output_tokens"] for part in parts[-1:]) == 24


def test_stream_over_grpc_joins_to_the_whole_text(triton: Triton) -> None:
    whole = text_of(triton, text_input=PROMPT, max_tokens=24)
    answer = stream(triton, text_input=PROMPT, max_tokens=24)
    assert answer.text == whole
    assert (answer.finish_reason, answer.output_tokens) == ("length", 24)
    assert len(answer.arrivals) > 3


def test_not_streaming_over_grpc_is_one_response(triton: Triton) -> None:
    answer = stream(triton, text_input=PROMPT, max_tokens=24, stream=False)
    assert len(answer.arrivals) == 1
    assert answer.text == text_of(triton, text_input=PROMPT, max_tokens=24)


def test_facade_serves_infer_over_http(triton: Triton) -> None:
    client = tritonclient.http.InferenceServerClient(triton.http_url)
    prompt = tritonclient.http.InferInput("text_input", [1], "BYTES")
    prompt.set_data_from_numpy(np.array([PROMPT.encode()], dtype=object))
    most = tritonclient.http.InferInput("max_tokens", [1], "INT32")
    most.set_data_from_numpy(np.array([12], dtype=np.int32))
    answer = client.infer(FACADE, [prompt, most])
    client.close()
    assert answer.as_numpy("text_output")[0].decode() == text_of(triton, text_input=PROMPT, max_tokens=12)
    assert answer.as_numpy("output_ids").shape == (12,)
    assert answer.as_numpy("num_input_tokens").tolist() == [5]


def test_facade_serves_infer_over_grpc(triton: Triton) -> None:
    with tritonclient.grpc.InferenceServerClient(triton.grpc_url) as client:
        answer = client.infer(FACADE, [tensor("text_input", PROMPT), tensor("max_tokens", 12)])
    assert answer.as_numpy("text_output")[0].decode() == text_of(triton, text_input=PROMPT, max_tokens=12)
    assert answer.as_numpy("finish_reason").tolist() == [b"length"]


def test_facade_passes_errors_on(triton: Triton) -> None:
    with (
        tritonclient.grpc.InferenceServerClient(triton.grpc_url) as client,
        pytest.raises(tritonclient.grpc.InferenceServerException, match=r"max_tokens.*-1"),
    ):
        client.infer(FACADE, [tensor("text_input", PROMPT), tensor("max_tokens", -1)])


def test_messages_use_the_chat_template(triton: Triton, demo_release: Path) -> None:
    tokenizer = Tokenizer.from_file(str(demo_release / "tokenizer.json"))
    prompt = tokenizer.encode(TEMPLATED, add_special_tokens=False).ids
    status, body = generate(triton, messages=CHAT, max_tokens=16)
    assert status == 200, body
    assert body["num_input_tokens"] == len(prompt)
    assert body["text_output"] == text_of(triton, input_ids=prompt, max_tokens=16)


def test_ids_give_the_text_of_their_prompt(triton: Triton) -> None:
    status, body = generate(triton, input_ids=[504, 3575, 282, 4649, 314], max_tokens=12)
    assert status == 200, body
    assert body["text_output"] == text_of(triton, text_input=PROMPT, max_tokens=12)


def test_a_prefix_seen_once_is_not_computed_again(triton: Triton) -> None:
    salt = secrets.token_hex(8)
    before = triton.metric("cached_tokens_total", model=MODEL)
    first = stream(triton, text_input=LONG, max_tokens=16, cache_salt=salt)
    second = stream(triton, text_input=LONG, max_tokens=16, cache_salt=salt)
    assert first.cached_tokens == 0
    assert first.input_tokens > 300
    assert second.cached_tokens >= first.input_tokens - 34
    assert second.text == first.text
    assert second.ttft_s < first.ttft_s
    triton_now = triton.metric("cached_tokens_total", model=MODEL)
    assert (
        triton_now >= before
    )  # the page is refreshed from another thread; its value is tested with the metrics


def test_a_salt_keeps_prefixes_apart_and_no_cache_leaves_them_out(triton: Triton) -> None:
    salt = secrets.token_hex(8)
    text = stream(triton, text_input=LONG, max_tokens=8, cache_salt=salt).text
    other = stream(triton, text_input=LONG, max_tokens=8, cache_salt=salt + "x")
    assert (other.cached_tokens, other.text) == (0, text)
    without = stream(triton, text_input=LONG, max_tokens=8, cache_salt=salt, no_cache=True)
    assert (without.cached_tokens, without.text) == (0, text)


def test_streams_together_give_the_text_of_each_alone(triton: Triton) -> None:
    prompts = [PROMPT, "Once upon a time", "1, 2, 3, 4,", LONG, "def add(a, b):", "Dear friend,"]
    requests: list[dict[str, object]] = [
        {"text_input": prompt, "max_tokens": 20, "no_cache": number % 2 == 0}
        for number, prompt in enumerate(prompts)
    ]
    assert len(requests) > LANES
    requests[1] |= {"temperature": 0.8, "top_p": 0.9, "seed": 7}
    requests[4] |= {"temperature": 1.2, "top_k": 20, "seed": 123}
    alone = [stream(triton, **request).text for request in requests]
    together = [answer.text for answer in all_at_once(triton, requests)]
    assert together == alone


def test_same_prompt_at_once_is_computed_once(triton: Triton) -> None:
    salt = secrets.token_hex(8)
    answers = all_at_once(triton, [{"text_input": LONG, "max_tokens": 4, "cache_salt": salt}] * 3)
    assert len({answer.text for answer in answers}) == 1
    computed = [answer.input_tokens - answer.cached_tokens for answer in answers]
    assert sum(computed) < 2 * answers[0].input_tokens


@pytest.mark.parametrize(
    "prompt",
    [
        "Grüße aus Köln! Übersetze:",
        "日本の首都は",
        "👩‍👩‍👧‍👦 family emoji 🎉🎉",
        "e\u0301 combining a\u0308",
        "नमस्ते दुनिया",
        "\u0000\u0007",
    ],
)
def test_unicode_prompts_stream_whole_characters(triton: Triton, prompt: str) -> None:
    whole = text_of(triton, text_input=prompt, max_tokens=32)
    answer = stream(triton, text_input=prompt, max_tokens=32)
    assert answer.text == whole
    assert list(events(triton, text_input=prompt, max_tokens=4, stream=True))[-1]["finish_reason"] in (
        "length",
        "stop",
    )


def test_stop_words_end_the_text_before_them(triton: Triton) -> None:
    whole = text_of(triton, text_input="1, 2, 3, 4,", max_tokens=24)
    assert " 7" in whole
    answer = stream(triton, text_input="1, 2, 3, 4,", max_tokens=24, stop_words=[" 7", "never"])
    assert answer.text == whole[: whole.index(" 7")]
    assert answer.finish_reason == "stop"


def test_the_same_seed_gives_the_same_text(triton: Triton) -> None:
    fields = {"text_input": PROMPT, "max_tokens": 16, "temperature": 1.0, "top_p": 0.95}
    first = text_of(triton, **fields, seed=11)
    assert text_of(triton, **fields, seed=11) == first
    assert any(text_of(triton, **fields, seed=seed) != first for seed in (12, 13, 14))


def test_the_prompt_comes_first_when_asked_for(triton: Triton) -> None:
    whole = text_of(triton, text_input=PROMPT, max_tokens=4, exclude_input_in_output=False)
    assert whole == PROMPT + text_of(triton, text_input=PROMPT, max_tokens=4)


def test_sampling_parameters_yield_to_inputs(triton: Triton) -> None:
    document = json.dumps({"max_tokens": 3, "temperature": 0})
    assert generate(triton, text_input=PROMPT, sampling_parameters=document)[1]["num_output_tokens"] == 3
    both = generate(triton, text_input=PROMPT, sampling_parameters=document, max_tokens=5)
    assert both[1]["num_output_tokens"] == 5


@pytest.mark.parametrize("number", range(4), ids=["curl", "curl-stream", "http", "grpc-stream"])
def test_examples_to_paste_work(triton: Triton, number: int) -> None:
    """Each example that `make run` prints, pasted into a shell, tells the beginning of the same text."""
    text = client_examples(triton.address, MODEL).replace(".venv/bin/python", sys.executable)
    example = text.strip().split("\n\n")[number]
    pasted = subprocess.run(["/bin/bash"], input=example, capture_output=True, text=True, timeout=60)
    assert pasted.returncode == 0, pasted.stderr
    assert pasted.stderr == ""
    pieces = re.findall(r'"text_output":"((?:[^"\\]|\\.)*)"', pasted.stdout)
    told = (
        json.loads('"' + "".join(pieces) + '"')
        if pieces
        else pasted.stdout.split(" | cached:")[0].strip("\n")
    )
    whole = text_of(triton, text_input=PROMPT, max_tokens=32)
    assert len(told) > 8
    assert whole.startswith(told.rstrip("\n"))
