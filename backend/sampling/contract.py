"""What a sampler promises: logits of a step in, one token per row out, each row on its own.

Invariants
- The token of a row depends on its logits, its parameters, its own history and (seed, position): never on
  the other rows of the call, nor on how many there are. Alone or batched, the same bits.
- Logits are read only; they belong to the engine.
- One definition for every form: the filters keep a set of tokens (see `nucleus`), and the token drawn with
  the uniform u is the lowest id at which the cumulated weight of the kept tokens, in order of id, exceeds u
  times their whole weight. Forms differ by the rounding of float32 weights only.

Threads: one owner (the step loop).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from backend.errors import EngineFailed
from backend.generation import SamplingParams

BROKEN: Final = "the engine returned NaN or infinite logits"
NOTHING_ALLOWED: Final = "sampling: the mask and min_tokens leave no token to choose"
"""What `failures` say."""


class SamplerRow(Protocol):
    """What a sampler remembers of one sequence: counts for penalties and the position of the next token."""

    @property
    def position(self) -> int:
        """Where the next token goes, the prompt included: the counter that Philox is asked with."""
        ...

    def accept(self, token: int) -> None:
        """Take `token` as the next one of the sequence."""
        ...


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token per row. A row in `failures` has token −1; `logprobs` is None unless some row wants them.

    `logprobs[i]` is the log of the softmax of row i's raw logits at its token, before penalties, masks and
    temperature; NaN for rows that did not ask or failed.
    """

    tokens: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32] | None = None
    failures: Mapping[int, EngineFailed] = field(default_factory=dict)

    @classmethod
    def nothing(cls, rows: int, *, because: EngineFailed) -> "Sampled":
        """Every row failed, as the logits could not be had."""
        return cls(np.full(rows, -1, dtype=np.int64), failures=dict.fromkeys(range(rows), because))


class Sampler(Protocol):
    """Chooses the next tokens of a batch."""

    def row(
        self,
        params: SamplingParams,
        prompt: npt.NDArray[np.int64],
        *,
        min_tokens: int = 0,
        eos_token_ids: Collection[int] = (),
        logprobs: bool = False,
    ) -> SamplerRow:
        """Start a sequence. `eos_token_ids` are masked while fewer than `min_tokens` tokens were accepted."""
        ...

    def sample(
        self,
        logits: Any,
        rows: Sequence[SamplerRow],
        *,
        allowed_mask: npt.NDArray[np.int32] | None = None,
    ) -> Sampled:
        """Choose a token for every row of `logits` [n, V]; the caller then calls `accept` on rows it keeps.

        `logits` is the `array` of `engines.Logits`: float32 in numpy, or what exports
        `__cuda_array_interface__` together with the stream that writes it.

        `allowed_mask` int32 [n, ⌈V/32⌉]: bit j of word w set = token 32·w + j may be chosen. Rows whose
        logits are NaN or +inf, or that have no token left to choose, come back in `failures`; the others are
        unharmed.
        """
        ...
