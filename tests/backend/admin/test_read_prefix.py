"""What is registered is what prompts begin with: read like one, without what asks for an answer."""

import json

import numpy as np
import pytest

from backend.errors import InvalidRequest
from backend.parsing import read_prefix
from tests.backend.parsing.requests_made import LIMITS, NO_TEMPLATE, TEXT, make_text, parse, strings

ASKS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
ASKS += "{% if add_generation_prompt %}>>{% endif %}"
SYSTEM = {"role": "system", "content": "Be kind."}
QUESTION = {"role": "user", "content": "Why?"}


def chat(*messages):
    return {"messages": strings(json.dumps(messages))}


@pytest.mark.parametrize("name", ["text_input", "input_ids"])
def test_a_prefix_is_read_as_a_prompt_is(name):
    sent = {"text_input": strings("You are kind."), "input_ids": np.array([3, 4, 5], np.int32)}
    inputs = {name: sent[name]}
    tokens = read_prefix(inputs, TEXT, LIMITS)
    assert np.array_equal(tokens, parse(inputs).prompt)
    assert tokens.dtype == np.int64


def test_a_chat_goes_on_where_its_prefix_ends():
    text = make_text(ASKS)
    prefix = read_prefix(chat(SYSTEM), text, LIMITS)
    prompt = parse(chat(SYSTEM, QUESTION), text=text).prompt
    assert text.decode(prefix) == "[system]Be kind."
    assert np.array_equal(prompt[: len(prefix)], prefix)
    assert len(prompt) > len(prefix)


def test_a_template_that_begins_otherwise_without_the_question_is_refused():
    text = make_text("{% if add_generation_prompt %}A{% else %}B{% endif %}" + ASKS)
    with pytest.raises(InvalidRequest, match="messages: the chat template begins no prompt with these"):
        read_prefix(chat(SYSTEM), text, LIMITS)


@pytest.mark.parametrize(
    ("inputs", "text", "words"),
    [
        ({}, TEXT, "exactly one of text_input, messages, input_ids"),
        ({"text_input": strings("a"), **chat(SYSTEM)}, TEXT, "exactly one"),
        (chat(SYSTEM), NO_TEMPLATE, "no chat template"),
        ({"input_ids": np.array([LIMITS.vocab_size], np.int32)}, TEXT, r"input_ids\[0\]"),
        ({"input_ids": np.zeros(LIMITS.max_seq_len, np.int32)}, TEXT, "1 to 63 tokens"),
        ({"text_input": strings("a" * (LIMITS.max_prompt_bytes + 1))}, TEXT, "text_input"),
    ],
)
def test_what_is_no_prompt_is_no_prefix(inputs, text, words):
    with pytest.raises(InvalidRequest, match=words):
        read_prefix(inputs, text, LIMITS)
