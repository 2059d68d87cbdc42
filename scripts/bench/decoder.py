"""A decoder in this process: all around the engine is the product's, only Triton is not there."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from backend.access import EVERYBODY, Access, AuditLog, Caller, NoLimits, Verb
from backend.composition import wire
from backend.generation import Delta, Generation
from backend.metrics import Labels
from backend.service import DecoderService
from backend.settings import ModelSettings
from backend.text import TextModel
from cachemgr import NamespaceShare, PrefixCache
from engines import Engine, VerifiedRelease

Tokens = npt.NDArray[np.int64]

ANSWER_LIMIT_S = 120.0


@dataclass(slots=True)
class Heard:
    """The way back to one caller, who notes when something came. Times are time.perf_counter() seconds."""

    asked: float
    arrivals: list[float] = field(default_factory=list)
    tokens: int = 0
    cached_tokens: int = 0
    error: Exception | None = None
    gone: bool = False
    ended: threading.Event = field(default_factory=threading.Event)

    def send(self, delta: Delta, *, final: bool) -> None:
        """See backend.replies.Sender."""
        self.arrivals.append(time.perf_counter())
        self.tokens += len(delta.token_ids)
        self.error = delta.error
        if delta.usage is not None:
            self.cached_tokens = delta.usage.cached_tokens
        if final:
            self.ended.set()

    def cancelled(self) -> bool:
        """True once `gone` says so."""
        return self.gone

    def wait(self) -> "Heard":
        """Itself when the answer is complete; raises what the answer says, or TimeoutError."""
        if not self.ended.wait(ANSWER_LIMIT_S):
            raise TimeoutError(f"no complete answer within {ANSWER_LIMIT_S:.0f} s")
        if self.error is not None:
            raise self.error
        return self

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.arrivals[0] - self.asked


class Decoder:
    """Asks a wired decoder, as Triton's `execute` would."""

    def __init__(self, service: DecoderService) -> None:
        self._service = service

    def ask(self, prompt: Tokens, *, max_tokens: int, api_key: str = "") -> Heard:
        """Start a streamed greedy answer of exactly `max_tokens` tokens; returns at once."""
        inputs = {
            "input_ids": prompt.astype(np.int32),
            "max_tokens": np.array([max_tokens], np.int32),
            "stream": np.array([True]),
            "ignore_eos": np.array([True]),
        }
        heard = Heard(time.perf_counter())

        def sender(generation: Generation | None) -> Heard:
            return heard

        self._service.handle("", lambda: inputs, {"api_key": api_key}, sender=sender)
        return heard


@contextmanager
def decoder(
    engine: Engine,
    cache: PrefixCache,
    *,
    release: VerifiedRelease,
    settings: ModelSettings,
    access: Access | None = None,
) -> Iterator[Decoder]:
    """Wire `engine` and `cache`, which are closed at the end, with the text of `release`.

    Without `access` everybody is the same.
    """
    manifest = release.manifest
    text = TextModel.from_release(
        release.files,
        chat_template=manifest.chat_template,
        eos_token_ids=manifest.eos_token_ids,
        bos_token_id=manifest.bos_token_id,
        add_bos=manifest.add_bos,
    )
    service = wire(
        engine,
        cache,
        text=text,
        settings=settings,
        access=access or everybody(),
        instruments=NoInstruments(),
        labels={},
    )
    try:
        yield Decoder(service)
    finally:
        service.close()


class _Everybody:
    """An Authoriser with one namespace, without the warning that a server gives."""

    principals = 1

    def authorise(self, parameters: Mapping[str, object], *, verb: Verb) -> Caller:
        """See backend.access.Authoriser."""
        return EVERYBODY

    def follow(self, listener: Callable[[Mapping[str, NamespaceShare]], None]) -> None:
        """See backend.access.Authoriser."""

    def close(self) -> None:
        """Nothing to close."""


def everybody() -> Access:
    """No access control, and not a word about it."""
    return Access(_Everybody(), NoLimits(), AuditLog("bench"))


class _Silent:
    def increment(self, amount: float) -> None:
        pass

    def set(self, value: float) -> None:
        pass

    def observe(self, value: float) -> None:
        pass


class NoInstruments:
    """Metrics that nobody reads."""

    def counter(self, name: str, description: str, labels: Labels) -> _Silent:
        """See backend.metrics.Instruments."""
        return _Silent()

    def gauge(self, name: str, description: str, labels: Labels) -> _Silent:
        """See backend.metrics.Instruments."""
        return _Silent()

    def histogram(self, name: str, description: str, labels: Labels, *, buckets: Sequence[float]) -> _Silent:
        """See backend.metrics.Instruments."""
        return _Silent()
