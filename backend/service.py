"""A decoder in service: takes requests from the server's thread, and owns the threads that answer them.

    execute ─▶ parse ─▶ authorise ─▶ submit ─▶ (step loop) ─▶ (replies) ─▶ sender

Knows nothing of Triton: requests are names and arrays, the way back is a `Sender`.

Threads: `handle` on the server's thread (T1); `close` once, after the last `handle`.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy.typing as npt

from backend.access import Authoriser
from backend.errors import BackendError, EngineFailed
from backend.generation import Generation
from backend.replies import Replies, Sender
from backend.step_loop import StepLoop
from backend.stepper import Observer
from cachemgr import PrefixCache
from engines import Engine

log = logging.getLogger(__name__)


class Parser(Protocol):
    """Makes a Generation of a request, or raises InvalidRequest."""

    def __call__(
        self,
        request_id: str,
        inputs: Mapping[str, npt.NDArray[Any]],
        parameters: Mapping[str, object],
        *,
        namespace: str,
    ) -> Generation:
        """Check everything."""
        ...


class DecoderService:
    """One engine with everything around it, running."""

    def __init__(
        self,
        *,
        parse: Parser,
        authoriser: Authoriser,
        loop: StepLoop,
        replies: Replies,
        engine: Engine,
        cache: PrefixCache,
        observer: Observer,
        drain_s: float,
    ) -> None:
        self._parse = parse
        self._authoriser = authoriser
        self._loop = loop
        self._replies = replies
        self._engine = engine
        self._cache = cache
        self._observer = observer
        self._drain_s = drain_s
        replies.start()
        loop.start()

    @property
    def ready(self) -> bool:
        """True while requests are taken."""
        return self._loop.ready

    @property
    def release(self) -> str:
        """Digest of the release in service."""
        return self._engine.spec.digest

    def handle(
        self,
        request_id: str,
        inputs: Callable[[], Mapping[str, npt.NDArray[Any]]],
        parameters: Mapping[str, object],
        *,
        sender: Callable[[Generation | None], Sender],
    ) -> None:
        """Start a request; whatever happens, `sender` gets exactly one last delta. Never raises."""
        generation: Generation | None = None
        try:
            namespace = self._authoriser.namespace(parameters)
            generation = self._parse(request_id, inputs(), parameters, namespace=namespace)
            stream = self._replies.open(sender(generation))
            ticket = self._loop.submit(generation, stream)
        except BackendError as error:
            self._refuse(request_id, error, generation, sender=sender)
        except Exception:
            log.exception("request %s could not be handled", request_id or "-")
            failed = EngineFailed("internal error while the request was read; the log has the details")
            self._refuse(request_id, failed, generation, sender=sender)
        else:
            self._replies.watch(stream, ticket)

    def _refuse(
        self,
        request_id: str,
        error: BackendError,
        generation: Generation | None,
        *,
        sender: Callable[[Generation | None], Sender],
    ) -> None:
        if generation is None or not generation.probe:
            self._observer.refused(request_id, reason=type(error).__name__)
        self._replies.fail(self._replies.open(sender(generation)), error)

    def close(self) -> None:
        """Drain, stop the threads, free engine and cache. What the arena holds stays for the next process."""
        self._loop.stop(drain_s=self._drain_s)
        self._replies.stop()
        self._cache.close()
        self._engine.close()
