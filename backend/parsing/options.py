"""The options of a request from the three places they may come from, checked and merged.

Explicit inputs win over request parameters, which win over `sampling_parameters`, a JSON object that takes
the names of vLLM's SamplingParams as well. Names that are kept for later, or that only other servers know,
must be neutral.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy.typing as npt

from backend.errors import InvalidRequest
from backend.io import INPUTS, OPTIONS, PROMPTS, RESERVED, Port
from backend.parsing.limits import RequestLimits
from backend.parsing.values import Reader, Real, Text, Texts, Whole, flag, tensor_value
from backend.strict_json import read_json

Options = dict[str, Any]
"""Checked values by canonical name; absent names were not given."""

_PORTS: Final[Mapping[str, Port]] = {port.name: port for port in INPUTS}
_PROMPT_NAMES: Final = frozenset(port.name for port in PROMPTS)
_OPTION_NAMES: Final = frozenset(port.name for port in OPTIONS)
_RESERVED_NAMES: Final = frozenset(port.name for port in RESERVED)

_ALIASES: Final[Mapping[str, str]] = {"random_seed": "seed"}
_JSON_ALIASES: Final[Mapping[str, str]] = {**_ALIASES, "stop": "stop_words", "logprobs": "return_logprobs"}

_TRITON_PARAMETERS: Final = frozenset({"id", "timeout", "priority", "api_key"})
"""Parameters with a meaning of their own, or none here; `timeout` is read by the caller."""

_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "lora_name": ("",),
    "guided_decoding_guide": ("",),
    "guided_decoding_guide_type": ("",),
    "num_return_sequences": (1,),
    "beam_width": (1,),
    "image": ([], [""], ""),
}
_JSON_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    **_NEUTRAL,
    "n": (1, "1"),
    "best_of": (1, "1"),
    "use_beam_search": (False, "false"),
    "length_penalty": (1, 1.0, "1", "1.0"),
    "early_stopping": (False, "false"),
    "skip_special_tokens": (True, "true"),
    "spaces_between_special_tokens": (True, "true"),
    "detokenize": (True, "true"),
    "include_stop_str_in_output": (False, "false"),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "logit_bias": ({},),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
    "guided_decoding": (),
}


def readers(limits: RequestLimits) -> Mapping[str, Reader]:
    """How each option is read, by canonical name."""
    counts = 2**31 - 1
    return {
        "max_tokens": Whole(1, counts),
        "min_tokens": Whole(0, counts),
        "stream": flag,
        "stop_words": Texts(limits.max_stop_words, limits.max_stop_word_bytes),
        "temperature": Real(0, 100),
        "top_k": Whole(-1, counts),
        "top_p": Real(0, 1, above=True),
        "min_p": Real(0, 1),
        "repetition_penalty": Real(0.01, 100),
        "presence_penalty": Real(-2, 2),
        "frequency_penalty": Real(-2, 2),
        "seed": Whole(0, 2**64 - 1),
        "ignore_eos": flag,
        "exclude_input_in_output": flag,
        "return_logprobs": flag,
        "cache_salt": Text(limits.max_cache_salt_bytes),
        "no_cache": flag,
        "sampling_parameters": Text(limits.max_prompt_bytes),
    }


def read_options(
    inputs: Mapping[str, npt.NDArray[Any]], parameters: Mapping[str, object], *, limits: RequestLimits
) -> Options:
    """Everything but the prompt and `timeout`. InvalidRequest for what is unknown, wrong or not neutral."""
    read = readers(limits)
    explicit = _collect(_of_inputs(inputs), read, _ALIASES)
    given = _collect(_of_parameters(parameters, limits.forwarded_headers), read, _ALIASES)
    merged = given | explicit
    document = merged.pop("sampling_parameters", None)
    if document is None:
        return merged
    return _collect(_of_json(document), read, _JSON_ALIASES, prefix="sampling_parameters.") | merged


def _collect(
    values: Iterator[tuple[str, object]],
    read: Mapping[str, Reader],
    aliases: Mapping[str, str],
    prefix: str = "",
) -> Options:
    """Check (name, raw value) pairs of one place; two names of one option must agree."""
    options: Options = {}
    for name, raw in values:
        canonical = aliases.get(name, name)
        value = read[canonical](prefix + name, raw)
        if options.setdefault(canonical, value) != value:
            raise InvalidRequest(prefix + name, f"conflicts with another name of {canonical}", raw)
    return options


def _of_inputs(inputs: Mapping[str, npt.NDArray[Any]]) -> Iterator[tuple[str, object]]:
    for name, tensor in inputs.items():
        if name in _OPTION_NAMES:
            yield name, tensor_value(_PORTS[name], tensor)
        elif name in _RESERVED_NAMES:
            _check_neutral(name, tensor_value(_PORTS[name], tensor), _NEUTRAL)
        elif name not in _PROMPT_NAMES:
            raise InvalidRequest(name, "is not an input of this model")


def _of_parameters(
    parameters: Mapping[str, object], forwarded_headers: frozenset[str]
) -> Iterator[tuple[str, object]]:
    for name, raw in parameters.items():
        if name in _OPTION_NAMES:
            yield name, raw
        elif name in _RESERVED_NAMES:
            _check_neutral(name, raw, _NEUTRAL)
        elif name in _PROMPT_NAMES:
            raise InvalidRequest(name, "must be an input, not a request parameter")
        elif not (
            name in _TRITON_PARAMETERS or name.startswith("triton_") or name.lower() in forwarded_headers
        ):
            raise InvalidRequest(name, "is not a parameter of this model")


def _of_json(document: str) -> Iterator[tuple[str, object]]:
    """The pairs of sampling_parameters; null means absent."""
    content = read_json(document, field="sampling_parameters")
    if not isinstance(content, dict):
        raise InvalidRequest("sampling_parameters", "must be a JSON object", content)
    for name, raw in content.items():
        if raw is None and (name in _OPTION_NAMES or name in _JSON_ALIASES or name in _JSON_NEUTRAL):
            continue
        if name == "logprobs":
            if type(raw) is not int or raw != 0:
                problem = "must be 0 (the chosen token's) or null"
                raise InvalidRequest("sampling_parameters.logprobs", problem, raw)
            yield name, True
        elif name == "stop" or (name in _OPTION_NAMES and name != "sampling_parameters"):
            yield name, raw
        elif name in _JSON_NEUTRAL:
            _check_neutral(name, raw, _JSON_NEUTRAL, prefix="sampling_parameters.")
        else:
            field = f"sampling_parameters.{name or repr(name)}"
            raise InvalidRequest(field, "is not a sampling parameter known here")


def _check_neutral(
    name: str, value: object, neutral: Mapping[str, tuple[object, ...]], *, prefix: str = ""
) -> None:
    """Refuse what is not supported unless it asks for nothing; True is not 1 here."""
    if not any(type(value) is type(one) and value == one for one in neutral[name]):
        wanted = " or ".join(repr(one) for one in neutral[name][:1]) or "null"
        raise InvalidRequest(prefix + name, f"is not supported; must be absent or {wanted}", value)
