"""A release in use: everything between a request and its engine that belongs to this release alone.

    parse (limits, tokenizer, names) ─▶ begin ─▶ Sequence ─▶ stepper (scheduler, lanes) ─▶ engine, cache

Releases with the same KV (`engines.shares_kv`) hand stepper, lanes and cache on: see `adopt`. Releases that
differ in KV, or in the layout of their lanes, have a stepper each; a cache they share if their blocks are the
same.

Threads: `parse` and `begin` by any; `adopt` by the step loop, between two steps; `close` by the one who
opened it, when the step loop has left it.
"""

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from backend.asked import Asked, Inputs
from backend.generation import Generation, ReplySink
from backend.ledger import Ledger
from backend.metrics import Reading
from backend.parsing import RequestLimits, parse_generation, read_prefix
from backend.sequence import Sequence, open_sequence
from backend.stepper import Stepper
from backend.text import TextModel
from cachemgr import PrefixCache
from engines import Engine, EngineSpec, ReleaseFacts, shares_kv

RELEASE_DIGITS: Final = 16
HOST: Final = "host"


class OpenRelease:
    """One release with its engine, cache, text and stepper."""

    def __init__(
        self,
        engine: Engine,
        cache: PrefixCache,
        *,
        text: TextModel,
        stepper: Stepper,
        limits: RequestLimits,
        ledger: Ledger,
    ) -> None:
        """`stepper` is its own, or that of a release that it will `adopt`."""
        self._engine = engine
        self._text = text
        self._limits = limits
        self._eos = frozenset(text.eos_token_ids)
        self._ledger = ledger
        self.cache = cache
        self.stepper = stepper
        self.facts: ReleaseFacts | None = None
        """What its folder was like when it was loaded; None for an engine that came from no folder."""
        self.spec: EngineSpec = engine.spec
        self.name = self.spec.digest[:RELEASE_DIGITS]
        ledger.open(cache, lambda: [Reading(name, value, HOST) for name, value in cache.counters().items()])
        ledger.open(stepper, stepper.readings)

    def parse(self, asked: Asked, clock: Callable[[], float]) -> Generation:
        """Check everything. Raises InvalidRequest. A seed that was not given is drawn anew each time."""
        return parse_generation(
            asked.request_id,
            asked.inputs,
            asked.parameters,
            limits=self._limits,
            text=self._text,
            hasher=self.cache,
            caller=asked.caller,
            clock=clock,
            release=self.name,
        )

    def read_prefix(self, inputs: Inputs) -> npt.NDArray[np.int64]:
        """The tokens that prompts which go on from this one begin with. Raises InvalidRequest."""
        return read_prefix(inputs, self._text, self._limits)

    def begin(self, asked: Asked, request: Generation, sink: ReplySink) -> Sequence:
        """A sequence for this release's stepper."""
        row = self.stepper.sampler.row(
            request.sampling,
            request.prompt,
            min_tokens=request.min_tokens,
            eos_token_ids=self._text.eos_token_ids,
            logprobs=request.logprobs,
        )
        text = self._text.stream(request.stop_words, min_tokens=request.min_tokens)
        room = self.spec.max_seq_len
        seq = open_sequence(
            asked.ticket, request, sink=sink, text=text, row=row, eos=self._eos, max_seq_len=room
        )
        seq.asked = asked
        return seq

    def goes_on(self, before: "OpenRelease") -> bool:
        """True if this one takes over the lanes of `before`, with all that runs in them."""
        return self.stepper is before.stepper and shares_kv(self.spec, before.spec)

    def adopt(self, before: "OpenRelease") -> None:
        """Take over the lanes of `before`, which can only be closed afterwards."""
        assert self.goes_on(before), "lanes of another identity or layout"
        self.stepper.adopt(self._engine)

    def close(self, *, keep: "OpenRelease | None" = None) -> None:
        """Free everything but what `keep` uses as well."""
        if keep is None or keep.stepper is not self.stepper:
            self._ledger.close(self.stepper)
        if keep is None or keep.cache is not self.cache:
            self._ledger.close(self.cache)
            self.cache.close()
        self._engine.close()
