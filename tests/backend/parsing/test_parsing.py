import json
from typing import Any

import numpy as np
import pytest

from backend.errors import InvalidRequest
from tests.backend.parsing.requests_made import (
    NOW,
    TEXT,
    Inputs,
    ShownHasher,
    hello,
    one,
    parse,
    sampling,
    strings,
)


def test_defaults() -> None:
    made = parse(hello())
    assert made.request_id == "r1"
    assert made.prompt.tolist() == TEXT.encode("hello").tolist()
    assert made.prompt.dtype == np.int64
    assert (made.max_tokens, made.min_tokens) == (16, 0)
    assert made.sampling.temperature == 0
    assert made.sampling.seed == 0
    assert made.stop_words == ()
    assert (made.stream, made.echo, made.logprobs, made.ignore_eos, made.use_cache) == (
        False,
        False,
        False,
        False,
        True,
    )
    assert (made.received, made.deadline, made.namespace, made.cache_salt) == (NOW, None, "ns", "")
    assert made.prompt_text == ""


def test_every_option_as_an_input() -> None:
    made = parse(
        hello(
            max_tokens=one(7, np.int32),
            min_tokens=one(2, np.int32),
            stream=one(True, np.bool_),
            stop_words=strings("a", "", "b"),
            temperature=one(0.7, np.float32),
            top_k=one(-1, np.int32),
            top_p=one(0.9, np.float32),
            min_p=one(0.05, np.float32),
            repetition_penalty=one(1.1, np.float32),
            presence_penalty=one(-1.5, np.float32),
            frequency_penalty=one(0.3, np.float32),
            seed=one(2**64 - 1, np.uint64),
            ignore_eos=one(True, np.bool_),
            return_logprobs=one(True, np.bool_),
            exclude_input_in_output=one(False, np.bool_),
            cache_salt=strings("s"),
            no_cache=one(False, np.bool_),
        )
    )
    assert (made.max_tokens, made.min_tokens, made.stream, made.stop_words) == (7, 2, True, ("a", "b"))
    sampled = made.sampling
    assert (sampled.temperature, sampled.top_k, sampled.top_p, sampled.min_p) == (0.7, 0, 0.9, 0.05)
    assert (sampled.repetition_penalty, sampled.presence_penalty, sampled.frequency_penalty) == (
        1.1,
        -1.5,
        0.3,
    )
    assert sampled.seed == 2**64 - 1
    assert (made.ignore_eos, made.logprobs, made.echo) == (True, True, True)
    assert made.prompt_text == "hello"
    assert made.block_hashes == ShownHasher().hashes(made.prompt, namespace="ns", salt="s")
    assert made.cache_salt == "s"


def test_the_three_prompts() -> None:
    assert parse({"input_ids": np.array([5, 6], np.int32)}).prompt.tolist() == [5, 6]
    messages = strings('[{"role": "user", "content": "hi"}]')
    made = parse({"messages": messages, "exclude_input_in_output": one(False, np.bool_)})
    assert made.prompt_text == "[user]hi>"
    assert made.prompt.tolist() == TEXT.encode_raw("[user]hi>").tolist()
    ids = np.array(TEXT.encode("ab"), np.int32)
    assert parse({"input_ids": ids, "exclude_input_in_output": one(False, np.bool_)}).prompt_text == "ab"


def test_without_cache_nothing_is_hashed() -> None:
    made = parse(hello(no_cache=one(True, np.bool_)))
    assert made.block_hashes == ()
    assert not made.use_cache


@pytest.mark.parametrize(("asked", "kept"), [(16, 16), (58, 58), (59, 59), (60, 59), (2**31 - 1, 59)])
def test_max_tokens_is_cut_to_the_room(asked: int, kept: int) -> None:
    made = parse({"input_ids": np.arange(5, dtype=np.int32), "max_tokens": one(asked, np.int32)})
    assert made.max_tokens == kept


def test_one_token_must_fit_after_the_prompt() -> None:
    made = parse({"input_ids": np.ones(63, np.int32), "min_tokens": one(4, np.int32)})
    assert (made.max_tokens, made.min_tokens) == (1, 1)
    with pytest.raises(
        InvalidRequest, match=r"^input_ids: must have 1 to 63 tokens .max_seq_len 64.*, got 64$"
    ):
        parse({"input_ids": np.ones(64, np.int32)})


def test_the_deadline_counts_microseconds_from_arrival() -> None:
    assert parse(hello(), {"timeout": 2_500_000}).deadline == NOW + 2.5
    assert parse(hello(), {"timeout": "2500000"}).deadline == NOW + 2.5
    assert parse(hello(), {"timeout": 0}).deadline is None


def test_a_seed_is_drawn_only_where_it_matters() -> None:
    assert parse(hello(temperature=one(0.5, np.float32))).sampling.seed == 4711
    assert parse(hello(temperature=one(0.5, np.float32), seed=one(0, np.uint64))).sampling.seed == 0
    assert parse(hello()).sampling.seed == 0


def test_random_seed_is_seed() -> None:
    assert parse(hello(random_seed=one(9, np.uint64))).sampling.seed == 9
    assert parse(hello(random_seed=one(9, np.uint64), seed=one(9, np.uint64))).sampling.seed == 9
    assert parse(sampling({"random_seed": 9})).sampling.seed == 9
    with pytest.raises(InvalidRequest, match=r"^random_seed: conflicts with another name of seed, got 9$"):
        parse(hello(seed=one(8, np.uint64), random_seed=one(9, np.uint64)))


def test_inputs_win_over_parameters_and_those_over_json() -> None:
    document = json.dumps({"temperature": 0.1, "top_k": 1, "top_p": 0.1, "seed": 1})
    made = parse(
        hello(
            sampling_parameters=strings(document),
            temperature=one(0.3, np.float32),
            random_seed=one(3, np.uint64),
        ),
        {"temperature": 0.2, "top_k": 2, "seed": 2},
    )
    assert (made.sampling.temperature, made.sampling.top_k, made.sampling.top_p) == (0.3, 2, 0.1)
    assert made.sampling.seed == 3


def test_sampling_parameters_take_the_names_of_vllm() -> None:
    made = parse(
        sampling(
            {
                "n": 1,
                "best_of": None,
                "temperature": "0.4",
                "top_p": "0.95",
                "top_k": -1,
                "max_tokens": "12",
                "min_tokens": 3,
                "stop": ["x", "y"],
                "ignore_eos": "true",
                "logprobs": 0,
                "seed": None,
                "skip_special_tokens": True,
                "presence_penalty": 1,
                "use_beam_search": False,
                "min_p": 0,
            }
        )
    )
    assert (made.sampling.temperature, made.sampling.top_p, made.sampling.top_k) == (0.4, 0.95, 0)
    assert (made.max_tokens, made.min_tokens, made.stop_words) == (12, 3, ("x", "y"))
    assert (made.ignore_eos, made.logprobs, made.sampling.presence_penalty) == (True, True, 1.0)


@pytest.mark.parametrize(
    ("stop", "words"),
    [(strings(), ()), (strings(""), ()), (strings("ab"), ("ab",)), (strings("b", "a", ""), ("b", "a"))],
)
def test_forms_of_stop_words_as_input(stop: np.ndarray[Any, Any], words: tuple[str, ...]) -> None:
    assert parse(hello(stop_words=stop)).stop_words == words


@pytest.mark.parametrize(
    ("stop", "words"), [("", ()), ("ab", ("ab",)), ([], ()), (["a", ""], ("a",)), (None, ())]
)
def test_forms_of_stop_words_in_json(stop: object, words: tuple[str, ...]) -> None:
    assert parse(sampling({"stop": stop})).stop_words == words


def test_an_empty_input_wins_over_json() -> None:
    inputs = sampling({"stop": "x"}) | {"stop_words": strings("")}
    assert parse(inputs).stop_words == ()


@pytest.mark.parametrize(
    "inputs",
    [
        hello(lora_name=strings("")),
        hello(guided_decoding_guide=strings("")),
        hello(beam_width=one(1, np.int32)),
        hello(num_return_sequences=one(1, np.int32)),
        hello(image=strings()),
        hello(image=strings("")),
        sampling("{}"),
        sampling({"temperature": None, "n": None, "logit_bias": {}}),
    ],
)
def test_neutral_values_change_nothing(inputs: Inputs) -> None:
    assert parse(inputs).sampling == parse(hello()).sampling


@pytest.mark.parametrize(
    "parameters",
    [
        {"id": "7"},
        {"priority": 3},
        {"triton_final_response": True},
        {"triton_enable_empty_final_response": True},
        {"authorization": "Bearer x"},
        {"Authorization": "Bearer x"},
        {"api_key": "k"},
        {"beam_width": 1},
    ],
)
def test_parameters_of_others_pass(parameters: dict[str, Any]) -> None:
    assert parse(hello(), parameters).sampling == parse(hello()).sampling


def test_options_may_come_as_parameters() -> None:
    made = parse(
        hello(), {"max_tokens": 5, "temperature": 0.25, "stop_words": "x", "stream": True, "top_k": "7"}
    )
    assert (made.max_tokens, made.stop_words, made.stream) == (5, ("x",), True)
    assert (made.sampling.temperature, made.sampling.top_k) == (0.25, 7)


@pytest.mark.parametrize(
    ("max_tokens", "ids", "parameters", "probe"),
    [
        (1, 8, {"triton_probe": True}, True),
        (1, 8, {}, False),
        (2, 8, {"triton_probe": True}, False),
        (1, 9, {"triton_probe": True}, False),
    ],
)
def test_only_the_smallest_request_is_a_probe(
    max_tokens: int, ids: int, parameters: dict[str, Any], probe: bool
) -> None:
    inputs = {"input_ids": np.arange(ids, dtype=np.int32), "max_tokens": one(max_tokens, np.int32)}
    assert parse(inputs, parameters).probe is probe
