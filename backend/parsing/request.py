"""Makes a Generation of a request's inputs and parameters, or says in one line what is wrong with them.

Room: prompt and output share max_seq_len positions. The prompt alone must leave room for one token;
`max_tokens` beyond the room is cut to it, and the generation then ends with finish_reason "length".
"""

import secrets
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from backend.access import Caller, Verb
from backend.errors import InvalidRequest
from backend.generation import Generation, SamplingParams
from backend.parsing.limits import RequestLimits
from backend.parsing.options import Options, read_options
from backend.parsing.prompt import read_prompt
from backend.parsing.values import Whole
from backend.text import TextModel
from cachemgr import BlockHash

_MICROSECONDS: Final = Whole(0, 2**63 - 1)

PROBE: Final = "triton_probe"
"""Marks a supervisor's question whether the model lives. Only the smallest request may be one."""

PROBE_TOKENS: Final = 8

_SAMPLING: Final = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip


class Hasher(Protocol):
    """Names the whole blocks of a prompt: a PrefixCache."""

    def public_blocks(self, tokens: npt.NDArray[np.int64], *, salt: str = "") -> int:
        """How many leading blocks are public."""
        ...

    def hashes(
        self, tokens: npt.NDArray[np.int64], *, namespace: str, salt: str = "", public: int = 0
    ) -> list[BlockHash]:
        """One hash per whole block, chained."""
        ...


def _draw_seed() -> int:
    return secrets.randbits(64)


def parse_generation(
    request_id: str,
    inputs: Mapping[str, npt.NDArray[Any]],
    parameters: Mapping[str, object],
    *,
    limits: RequestLimits,
    text: TextModel,
    hasher: Hasher,
    caller: Caller,
    clock: Callable[[], float],
    fresh_seed: Callable[[], int] = _draw_seed,
    release: str = "",
) -> Generation:
    """Check everything and build the Generation. Raises InvalidRequest and nothing else.

    `inputs` are tensors by name, absent ones left out; `parameters` are bool, int, float or str, with
    `timeout` in microseconds (0: none). A request that samples without a seed gets one from `fresh_seed`.
    `release` is noted in it: whose limits and text these are.
    """
    received = clock()
    options = read_options(inputs, parameters, limits=limits)
    deadline = read_deadline(parameters, received)
    echo = not options.get("exclude_input_in_output", True)
    prompt = read_prompt(inputs, text, limits, echo=echo)
    max_tokens, min_tokens = _lengths(options, limits, room=limits.max_seq_len - len(prompt.tokens))
    salt, cached = options.get("cache_salt", ""), not options.get("no_cache", False)
    reads, writes = cached and caller.may(Verb.CACHE_READ), cached and caller.may(Verb.CACHE_WRITE)
    public = hasher.public_blocks(prompt.tokens, salt=salt) if reads or writes else 0
    return Generation(
        request_id=request_id,
        prompt=prompt.tokens,
        block_hashes=(
            hasher.hashes(prompt.tokens, namespace=caller.namespace, salt=salt, public=public)
            if reads or writes
            else ()
        ),
        namespace=caller.namespace,
        sampling=_sampling(options, fresh_seed),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_words=options.get("stop_words", ()),
        ignore_eos=options.get("ignore_eos", False),
        stream=options.get("stream", False),
        echo=echo,
        logprobs=options.get("return_logprobs", False),
        reads_cache=reads,
        writes_cache=writes,
        received=received,
        deadline=deadline,
        prompt_text=prompt.text if echo else "",
        cache_salt=salt,
        probe=PROBE in parameters and max_tokens == 1 and len(prompt.tokens) <= PROBE_TOKENS,
        release=release,
        principal=caller.principal,
        public_blocks=public,
        hides_cached_tokens=caller.hides_cached_tokens,
    )


def read_deadline(parameters: Mapping[str, object], received: float) -> float | None:
    """When the caller's patience ends, on the clock of `received`; None: never. Raises InvalidRequest."""
    timeout = _MICROSECONDS("timeout", parameters.get("timeout", 0))
    return received + timeout / 1e6 if timeout else None


def _sampling(options: Options, fresh_seed: Callable[[], int]) -> SamplingParams:
    values = {name: options[name] for name in _SAMPLING if name in options}
    seed = options.get("seed")
    if seed is None:
        seed = fresh_seed() if values.get("temperature", 0) > 0 else 0
    return SamplingParams(top_k=max(0, options.get("top_k", 0)), seed=seed, **values)


def _lengths(options: Options, limits: RequestLimits, *, room: int) -> tuple[int, int]:
    """max_tokens and min_tokens, cut to the room."""
    max_tokens = options.get("max_tokens", limits.default_max_tokens)
    min_tokens = options.get("min_tokens", 0)
    if min_tokens > max_tokens:
        raise InvalidRequest("min_tokens", f"must be at most max_tokens ({max_tokens})", min_tokens)
    return min(max_tokens, room), min(min_tokens, room)
