"""What a sampler remembers of one sequence: parameters, position, and the tokens that penalties count.

Both forms of the sampler take these rows, so a sequence may go on with the other form. The numpy form applies
a history itself; the torch form keeps a copy of it on the device.
"""

from collections.abc import Collection
from typing import Final

import numpy as np
import numpy.typing as npt

from backend.generation import SamplingParams

GREEDY_BELOW: Final = 1e-6
"""A temperature below this is greedy: the quotient would only overflow."""


class SequenceRow:
    """One sequence. `params`, `min_tokens` and `logprobs` never change.

    `position` is where the next token will stand in the sequence, prompt included: a run that is resumed with
    what it said so far as a longer prompt draws the same numbers.
    """

    __slots__ = ("__weakref__", "_first", "eos", "history", "logprobs", "min_tokens", "params", "position")

    def __init__(
        self,
        params: SamplingParams,
        prompt: npt.NDArray[np.int64],
        *,
        min_tokens: int,
        eos_token_ids: Collection[int],
        logprobs: bool,
    ) -> None:
        self.params = params
        self.position = self._first = len(prompt)
        self.logprobs = logprobs
        self.min_tokens = min_tokens if eos_token_ids else 0
        self.eos = np.array(sorted(eos_token_ids), dtype=np.int64)
        off = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1, 0, 0)
        counted = prompt if params.repetition_penalty != 1 else prompt[:0]
        self.history = None if off else TokenHistory(counted)

    @property
    def greedy(self) -> bool:
        """Whether the heaviest token is always taken."""
        return self.params.temperature < GREEDY_BELOW

    @property
    def adjusts(self) -> bool:
        """Whether logits must be changed now or later: rows that never do are skipped."""
        return self.history is not None or self.min_tokens > 0

    @property
    def must_go_on(self) -> bool:
        """Whether the end tokens `eos` may not be chosen yet."""
        return self.position - self._first < self.min_tokens

    def adjust(self, logits: npt.NDArray[np.float32]) -> None:
        """Apply penalties and the minimum length to this row's own copy of its logits [V]."""
        if self.history is not None:
            self.history.penalise(logits, self.params)
        if self.must_go_on:
            logits[self.eos] = -np.inf

    def accept(self, token: int) -> None:
        """Take `token` as the next one."""
        self.position += 1
        if self.history is not None:
            self.history.add(token)


class TokenHistory:
    """The distinct tokens of a sequence and how often each was generated (0: only in the prompt).

    A token keeps its column in `ids` and `counts`; `last` is the column of the token that was added last.
    """

    __slots__ = ("_counts", "_ids", "_slots", "last")

    def __init__(self, prompt: npt.NDArray[np.int64]) -> None:
        ids = np.unique(prompt)
        self._slots = {int(token): slot for slot, token in enumerate(ids)}
        self._ids = np.concatenate((ids, np.zeros(64, dtype=np.int64)))
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self.last = 0

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """The distinct tokens, in order of first appearance after those of the prompt."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """How often each of `ids` was generated."""
        return self._counts[: len(self._slots)]

    def add(self, token: int) -> None:
        """Count one generated token."""
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[slot] = token
        self._counts[slot] += 1
        self.last = slot

    def penalise(self, logits: npt.NDArray[np.float32], params: SamplingParams) -> None:
        """In place: repetition (prompt and output; Keskar et al. 2019), then frequency, presence (output)."""
        ids, counts = self.ids, self.counts
        values = logits[ids]
        if params.repetition_penalty != 1:
            rate = np.float32(params.repetition_penalty)
            values = np.where(values > 0, values / rate, values * rate)
        values -= counts * np.float32(params.frequency_penalty)
        values -= (counts > 0) * np.float32(params.presence_penalty)
        logits[ids] = values
