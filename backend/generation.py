"""One generation, from what the caller asked to what is sent back: the types that T1, T2 and T4 pass along.

T1 (Triton) builds a `Generation` and submits it; T2 (step loop) emits `Delta`s; T4 (replies) sends them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from cachemgr import BlockHash


class FinishReason(StrEnum):
    """Why a generation ended; the value is what `finish_reason` carries."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How tokens are chosen. temperature 0 is greedy; top_k 0, top_p 1, min_p 0 and penalties 1/0/0 off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Generation:
    """A checked request. Times are time.monotonic() seconds; `prompt` is int64 [N], N ≥ 1."""

    request_id: str
    prompt: npt.NDArray[np.int64]
    block_hashes: Sequence[BlockHash]
    namespace: str
    sampling: SamplingParams
    max_tokens: int
    min_tokens: int
    stop_words: tuple[str, ...]
    ignore_eos: bool
    stream: bool
    echo: bool
    logprobs: bool
    reads_cache: bool
    writes_cache: bool
    received: float
    deadline: float | None
    prompt_text: str = ""
    cache_salt: str = ""
    probe: bool = False
    release: str = ""
    """Whose tokenizer and limits it was read with: what output `release` says."""
    principal: str = ""
    """Who asks: lanes and turns are shared between principals."""
    public_blocks: int = 0
    """Leading blocks of the prompt whose names are everybody's."""
    hides_cached_tokens: bool = False

    @property
    def use_cache(self) -> bool:
        """True if its blocks have names at all."""
        return self.reads_cache or self.writes_cache


@dataclass(frozen=True, slots=True)
class Usage:
    """Totals of a finished generation."""

    input_tokens: int
    output_tokens: int
    cached_tokens: int
    ttft_s: float


@dataclass(slots=True)
class Delta:
    """What a step added: text that is final, its ids, and on the last one the reason and the totals."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: FinishReason | None = None
    usage: Usage | None = None
    error: Exception | None = None


class ReplySink(Protocol):
    """Where the step loop leaves deltas of one generation. Never blocks; called by T2 only."""

    def emit(self, delta: Delta) -> None:
        """Queue a delta. One with `finish` or `error` is the last."""
        ...
