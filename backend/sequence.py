"""One generation while it runs: its tokens, its lane, how much KV is written, and what was said so far.

A life: WAITING (queued) → LOADING (its cached blocks are on their way, or another sequence is making the
next one) → PREFILL (owns a lane) → DECODE → ENDED. Any state may end early. One that is preempted, in PREFILL
or DECODE, is WAITING again: it keeps its tokens and what was said, and its next prefill covers all of them.

    tokens    | prompt ................ | sampled ....... |
    positions 0            written                      length
              | KV is in the lane       | known, not yet written |

Invariants
- `written` ≤ `length`; in DECODE exactly one known token is not written yet.
- PREFILL ends at `prefill_stop`: the tokens that were known when it got its lane, the prompt or more.
- `lane` is set in PREFILL and DECODE only; `lease` in LOADING only.
- Blocks 0 … `kept` − 1 need no export: the cache had them, took them, or refused them.
- Its tokens are read by the release it was opened under (`text`, `eos`), whichever engine runs it meanwhile.

Threads: owned by the step loop.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from backend.asked import Asked
from backend.generation import Delta, Generation, ReplySink
from backend.sampling import SamplerRow
from cachemgr import BlockHash, Lease
from engines import LaneId


class State(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    LOADING = "loading"
    PREFILL = "prefill"
    DECODE = "decode"
    ENDED = "ended"


class TextStream(Protocol):
    """Turns tokens into final text; holds back what may still change or be cut by a stop word."""

    stopped: bool
    """True once a stop word was completed; nothing more will come out."""

    def push(self, token: int) -> str:
        """Take a token; the text that is final now."""
        ...

    def finish(self) -> str:
        """No more tokens: the rest of the text."""
        ...


@dataclass(slots=True, eq=False)
class Sequence:
    """A generation with all that the step loop knows about it. `tokens` has room for the longest outcome."""

    ticket: int
    request: Generation
    sink: ReplySink
    tokens: npt.NDArray[np.int64]
    length: int
    hashes: list[BlockHash]
    text: TextStream
    row: SamplerRow
    last_token: int
    eos: frozenset[int] = frozenset()
    asked: Asked | None = None
    state: State = State.WAITING
    lane: LaneId | None = None
    lease: Lease | None = None
    written: int = 0
    kept: int = 0
    awaited: BlockHash | None = None
    prefill_start: int = 0
    prefill_stop: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    """Of the prompt, when it got its first lane."""
    first_token_at: float | None = None
    unsent: Delta = field(default_factory=Delta)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.request.prompt.shape[0]

    @property
    def output_tokens(self) -> int:
        """Tokens sampled so far."""
        return self.length - self.request.prompt.shape[0]

    @property
    def unsampled(self) -> int:
        """Most tokens that may still be sampled."""
        return self.tokens.shape[0] - self.length

    @property
    def room(self) -> int:
        """Most positions this sequence may ever write: prompt and all samples but the last one."""
        return self.tokens.shape[0] - 1

    def append(self, token: int) -> None:
        """Add a sampled token; its KV is written by the next decode step."""
        self.tokens[self.length] = self.last_token = token
        self.length += 1

    @property
    def full(self) -> bool:
        """True when no further token may be sampled: max_tokens, or no position is left for the last one."""
        return self.length == self.tokens.shape[0]


def open_sequence(
    ticket: int,
    request: Generation,
    *,
    sink: ReplySink,
    text: TextStream,
    row: SamplerRow,
    eos: frozenset[int],
    max_seq_len: int,
) -> Sequence:
    """A WAITING sequence. The last sample needs no position: at most max_seq_len − prompt + 1 tokens."""
    prompt = request.prompt
    samples = min(request.max_tokens, max_seq_len - prompt.shape[0] + 1)
    tokens = np.empty(prompt.shape[0] + samples, dtype=np.int64)
    tokens[: prompt.shape[0]] = prompt
    hashes = list(request.block_hashes) if request.use_cache else []
    return Sequence(ticket, request, sink, tokens, prompt.shape[0], hashes, text, row, int(prompt[-1]), eos)
