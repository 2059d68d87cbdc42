"""The prompt of a request, and the beginning of many that an admin makes public: as tokens.

Exactly one of text_input, messages and input_ids says it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from backend.errors import InvalidRequest
from backend.io import PROMPTS, Port
from backend.parsing.limits import RequestLimits
from backend.parsing.values import Text, tensor_items, tensor_value
from backend.text import TextModel, read_messages

Inputs = Mapping[str, npt.NDArray[Any]]

_PORTS: Final[Mapping[str, Port]] = {port.name: port for port in PROMPTS}


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt in tokens; `text` is what an echo shows."""

    field: str
    tokens: npt.NDArray[np.int64]
    text: str


def read_prompt(inputs: Inputs, text: TextModel, limits: RequestLimits, *, echo: bool) -> Prompt:
    """The prompt, ready to be answered. Raises InvalidRequest."""
    return _read(inputs, text, limits, echo=echo, answered=True)


def read_prefix(inputs: Inputs, text: TextModel, limits: RequestLimits) -> npt.NDArray[np.int64]:
    """The tokens, int64 [N], that prompts which go on from this one begin with. Raises InvalidRequest.

    Of `messages` it is what the template makes of them where more follow, so without the words that ask for
    an answer.
    """
    return _read(inputs, text, limits, echo=False, answered=False).tokens


def _read(inputs: Inputs, text: TextModel, limits: RequestLimits, *, echo: bool, answered: bool) -> Prompt:
    given = [name for name in _PORTS if name in inputs]
    if len(given) != 1:
        names = ", ".join(_PORTS)
        raise InvalidRequest("inputs", f"must hold exactly one of {names}", given)
    name = given[0]
    if name == "input_ids":
        prompt = _from_ids(inputs[name], text, limits, echo=echo)
    else:
        prompt = _from_text(name, tensor_value(_PORTS[name], inputs[name]), text, limits, answered)
    _check_length(name, len(prompt.tokens), limits)
    return prompt


def _check_length(name: str, tokens: int, limits: RequestLimits) -> None:
    most = limits.max_seq_len - 1
    if not 1 <= tokens <= most:
        problem = f"must have 1 to {most} tokens (max_seq_len {limits.max_seq_len}, one is left to generate)"
        raise InvalidRequest(name, problem, tokens)


def _from_text(name: str, value: object, text: TextModel, limits: RequestLimits, answered: bool) -> Prompt:
    content = Text(limits.max_prompt_bytes)(name, value)
    if not content:
        raise InvalidRequest(name, "must not be empty")
    if name == "text_input":
        return Prompt(name, text.encode(content), content)
    if not text.has_chat_template:
        raise InvalidRequest(name, "this model has no chat template; send text_input")
    messages = read_messages(content)
    rendered = text.render_chat(messages, max_bytes=limits.max_prompt_bytes, answered=answered)
    if not answered and not text.render_chat(messages, max_bytes=limits.max_prompt_bytes).startswith(
        rendered
    ):
        raise InvalidRequest(name, "the chat template begins no prompt with these; send text_input")
    return Prompt(name, text.encode_raw(rendered), rendered)


def _from_ids(tensor: npt.NDArray[Any], text: TextModel, limits: RequestLimits, *, echo: bool) -> Prompt:
    items = tensor_items(_PORTS["input_ids"], tensor)
    _check_length("input_ids", len(items), limits)  # before any of them is looked at
    ids = items.astype(np.int64)
    wrong = np.flatnonzero((ids < 0) | (ids >= limits.vocab_size))
    if len(wrong):
        where = f"input_ids[{wrong[0]}]"
        raise InvalidRequest(where, f"must be in [0, {limits.vocab_size - 1}]", int(ids[wrong[0]]))
    return Prompt("input_ids", ids, text.decode(ids) if echo else "")
