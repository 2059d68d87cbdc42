"""The composition root: the one place that names implementations and wires a decoder together.

    settings → verified release → engine (warm, golden token answered) → cache → OpenRelease
    OpenRelease, replies, step loop, admission, metrics, swapper → DecoderService

What belongs to a release is built by `ReleaseOpener`, at load and again for each swap; everything else there
is once per process. Any step that refuses raises; whatever was opened before it is closed again, so that a
failed load leaves nothing behind.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from backend.access import Authoriser
from backend.admission import Admission
from backend.first_release import open_first
from backend.gpu_memory import GpuMemory
from backend.ledger import Ledger
from backend.metrics import Instruments, Reading, RequestMetrics
from backend.no_cache import NoCache
from backend.open_release import OpenRelease
from backend.parsing import RequestLimits
from backend.parsing.limits import FORWARDED_HEADERS
from backend.prefix_reuse import PrefixReuse
from backend.recheck import Recheck
from backend.replies import Replies
from backend.sampling import choose_sampler
from backend.scheduler import Scheduler
from backend.service import DecoderService
from backend.settings import ModelSettings, NodeSettings
from backend.step_loop import StepLoop
from backend.stepper import Stepper
from backend.swapper import Swapper, SwapSettings
from backend.text import TextModel
from backend.watchdog import Watchdog
from cachemgr import BlockFormat, CacheSecrets, LaneTier, PrefixCache, open_cache
from engines import (
    Engine,
    EngineManifest,
    EngineSpec,
    LanePool,
    Runner,
    VerifiedRelease,
    device_memory_use,
    give_back_freed_memory,
    load_release,
    open_engine,
    open_page_locker,
    shares_kv,
)

MIN_PROMPT_BYTES = 64 * 1024
PROMPT_BYTES_PER_TOKEN = 32

GPU_RUNTIME = "tensorrt"
HOST_DEVICE = "cpu"

Clock = Callable[[], float]
Parts = tuple[StepLoop, Admission, Watchdog]
T = TypeVar("T")


def open_decoder(
    model: str,
    version_dir: Path,
    *,
    settings: ModelSettings,
    node: NodeSettings,
    authoriser: Authoriser,
    instruments: Instruments,
    labels: Mapping[str, str],
) -> DecoderService:
    """Load the current release of `version_dir` and put it in service."""
    process = Process.around(settings, instruments, labels, forwarded_headers=node.forwarded_headers)
    opener = ReleaseOpener(model, version_dir, node=node, process=process)
    if settings.swap == "off":  # whoever loads wants this one
        serving = opener.current(beside=None, run=at_once)
    else:
        serving = open_first(opener, version_dir, run=at_once)
    give_back_freed_memory()
    loop, admission, watchdog = process.start_serving(serving, authoriser)
    recheck = Recheck(
        trust=node.trust,
        recheck_s=settings.recheck_s,
        rehash_s=settings.rehash_s,
        unready=settings.recheck_unready,
    )
    process.ledger.open(recheck, recheck.readings)

    def watch(now: OpenRelease) -> None:
        if now.facts is not None:
            recheck.watch(now.facts)

    watch(serving)
    swapper = Swapper(
        serving,
        version_dir,
        settings=SwapSettings(settings.swap, settings.swap_poll_s, settings.drain_s),
        opener=opener,
        loop=loop,
        admission=admission,
        metrics=process.metrics,
        now_serves=watch,
    )
    return DecoderService(
        serving, loop=loop, admission=admission, replies=process.replies, watchdog=watchdog,
        drain_s=settings.drain_s, swapper=swapper, recheck=recheck,
    )  # fmt: skip


def wire(
    engine: Engine,
    cache: PrefixCache,
    *,
    text: TextModel,
    settings: ModelSettings,
    authoriser: Authoriser,
    instruments: Instruments,
    labels: Mapping[str, str],
    forwarded_headers: frozenset[str] = FORWARDED_HEADERS,
    clock: Clock = time.monotonic,
) -> DecoderService:
    """Everything between a request and an engine that is open already, started. It serves no other."""
    process = Process.around(settings, instruments, labels, forwarded_headers=forwarded_headers, clock=clock)
    serving = process.assemble(engine, cache, text=text)
    loop, admission, watchdog = process.start_serving(serving, authoriser)
    return DecoderService(
        serving, loop=loop, admission=admission, replies=process.replies, watchdog=watchdog,
        drain_s=settings.drain_s,
    )  # fmt: skip


def at_once(job: Callable[[], T], /) -> T:
    """The runner of whoever has no engine at work yet."""
    return job()


class ReleaseOpener:
    """Runs the whole load chain, from the signature to the golden token, and opens what passes it."""

    def __init__(self, model: str, version_dir: Path, *, node: NodeSettings, process: "Process") -> None:
        self._model = model
        self._version_dir = version_dir
        self._node = node
        self._process = process
        self._text: tuple[object, TextModel] | None = None
        """That of the release opened last, and what it was made of."""
        ask = partial(device_memory_use, process.settings.device)
        self._gpu_memory = GpuMemory(ask, clock=process.clock)

    def current(self, *, beside: OpenRelease | None, run: Runner) -> OpenRelease:
        """The release that `current` names. `beside` serves meanwhile; lanes and cache go on if they can."""
        return self._open(
            load_release(self._version_dir, model=self._model, trust=self._node.trust), beside=beside, run=run
        )  # no name here holds its bytes

    def published(self, digest: str, *, run: Runner) -> OpenRelease:
        """A release of the version folder by its digest, whatever `current` names."""
        return self._open(
            load_release(self._version_dir, digest, model=self._model, trust=self._node.trust),
            beside=None,
            run=run,
        )

    def _open(self, release: VerifiedRelease, *, beside: OpenRelease | None, run: Runner) -> OpenRelease:
        manifest = release.manifest
        text = self._text_of(release)
        options = self._process.settings.engine_options()
        facts = release.facts
        device = f"cuda:{options.device}" if manifest.runtime == GPU_RUNTIME else HOST_DEVICE
        with ExitStack() as undo:
            engine = open_engine(release, options, beside=beside.spec if beside else None, run=run)
            del release  # the engine has its own copy of the weights
            undo.callback(engine.close)
            spec = engine.spec
            if beside is not None and shares_kv(spec, beside.spec):
                opened = self._process.assemble(engine, beside.cache, text=text, stepper=beside.stepper)
            elif beside is not None and _same_blocks(spec, beside.spec):
                opened = self._process.assemble(engine, beside.cache, text=text, device=device)
            else:
                cache = open_prefix_cache(spec, manifest, settings=self._process.settings, node=self._node)
                undo.callback(cache.close)
                opened = self._process.assemble(engine, cache, text=text, device=device)
            undo.pop_all()
        self._text = _text_facts(manifest), text
        opened.facts = facts
        if manifest.runtime == GPU_RUNTIME:
            self._process.ledger.open(self, self._gpu_memory.readings)
        return opened

    def _text_of(self, release: VerifiedRelease) -> TextModel:
        """The text side. Reading a tokenizer holds Python's lock for long: an equal one is not read again."""
        manifest = release.manifest
        if self._text is not None and self._text[0] == _text_facts(manifest):
            return self._text[1]
        return TextModel.from_release(
            release.files,
            chat_template=manifest.chat_template,
            eos_token_ids=manifest.eos_token_ids,
            bos_token_id=manifest.bos_token_id,
            add_bos=manifest.add_bos,
        )


def _text_facts(manifest: EngineManifest) -> tuple[object, ...]:
    """All that a text model is made of; the load chain compared the tokenizer's bytes with its digest."""
    return (
        manifest.tokenizer_digest,
        manifest.chat_template,
        manifest.eos_token_ids,
        manifest.bos_token_id,
        manifest.add_bos,
    )


def _same_blocks(one: EngineSpec, other: EngineSpec) -> bool:
    """True if blocks of one are blocks of the other; the layout of their lanes may differ."""
    return (one.kv_identity, one.block_shape, one.kv_dtype) == (
        other.kv_identity, other.block_shape, other.kv_dtype
    )  # fmt: skip


def open_prefix_cache(
    spec: EngineSpec, manifest: EngineManifest, *, settings: ModelSettings, node: NodeSettings
) -> PrefixCache:
    """The host tier for this engine's identity, or the null cache."""
    if settings.cache == "off":
        return NoCache()
    block_format = BlockFormat(
        kv_identity=spec.kv_identity,
        dtype=manifest.kv_dtype,
        layers=spec.geometry.layers,
        kv_heads=spec.geometry.kv_heads,
        head_dim=spec.geometry.head_dim,
        block_tokens=spec.block_tokens,
    )
    pins = open_page_locker(manifest.runtime, device=settings.device)
    return open_cache(block_format, node.cache, CacheSecrets.load(node.secrets_dir), pins=pins)


@dataclass(slots=True)
class Process:
    """What there is once, whichever release serves: settings, metrics, replies, and what hangs on them."""

    settings: ModelSettings
    metrics: RequestMetrics
    replies: Replies
    ledger: Ledger
    forwarded_headers: frozenset[str]
    clock: Clock
    parts: list[Parts] = field(default_factory=list)
    """Filled once: metrics and replies are made before what they look at."""

    @classmethod
    def around(
        cls,
        settings: ModelSettings,
        instruments: Instruments,
        labels: Mapping[str, str],
        *,
        forwarded_headers: frozenset[str],
        clock: Clock = time.monotonic,
    ) -> "Process":
        """Everything that needs no release yet."""
        parts: list[Parts] = []
        ledger = Ledger()

        def readings() -> list[Reading]:
            found = ledger.readings()
            for loop, admission, watchdog in parts:
                found.extend(watchdog.readings())
                found.append(Reading("integrity_failures_total", float(loop.integrity_failures)))
                found.append(Reading("requests_held", float(admission.waiting)))
                if loop.serving is not None:
                    found.append(Reading("serving_release", float(loop.serving.spec.release)))
            return found

        metrics = RequestMetrics(instruments, labels, release="-", readings=readings, clock=clock)

        def after_round() -> None:
            for _, admission, _ in parts:
                admission.expire()
            metrics.publish()

        def cancel(ticket: int) -> None:
            for _, admission, _ in parts:
                admission.cancel(ticket)

        replies = Replies(cancel=cancel, after_round=after_round, clock=clock)
        return cls(settings, metrics, replies, ledger, forwarded_headers, clock, parts)

    def start_serving(self, serving: OpenRelease, authoriser: Authoriser) -> Parts:
        """The step loop, the door and the watchdog, ready to be started by the service."""
        settings = self.settings
        loop = StepLoop(serving, max_inbox=settings.max_queue_size + serving.spec.lanes, clock=self.clock)
        admission = Admission(
            loop,
            replies=self.replies,
            authoriser=authoriser,
            observer=self.metrics,
            max_waiting=settings.max_queue_size,
            keep_inputs=settings.swap == "drain",
            clock=self.clock,
        )
        self.metrics.load = lambda: loop.load
        self.metrics.release = serving.name
        watchdog = Watchdog(loop, self.replies, limit_s=settings.watchdog_s, clock=self.clock)
        self.parts.append((loop, admission, watchdog))
        return loop, admission, watchdog

    def assemble(
        self,
        engine: Engine,
        cache: PrefixCache,
        *,
        text: TextModel,
        stepper: Stepper | None = None,
        device: str = HOST_DEVICE,
    ) -> OpenRelease:
        """A release around `engine`; with the `stepper` of another, it will take over the lanes of that.

        `device`: where the engine leaves its logits, "cpu" or "cuda:N".
        """
        spec = engine.spec
        limits = RequestLimits(
            max_seq_len=spec.max_seq_len,
            vocab_size=spec.geometry.vocab_size,
            default_max_tokens=self.settings.default_max_tokens,
            max_prompt_bytes=max(MIN_PROMPT_BYTES, PROMPT_BYTES_PER_TOKEN * spec.max_seq_len),
            forwarded_headers=self.forwarded_headers,
        )
        own = stepper or self._stepper(engine, cache, device)
        return OpenRelease(engine, cache, text=text, stepper=own, limits=limits, ledger=self.ledger)

    def _stepper(self, engine: Engine, cache: PrefixCache, device: str) -> Stepper:
        """Lanes of its own, and everything that decides about them."""
        spec, kind = engine.spec, self.settings.sampler
        lanes = LanePool(spec)
        tier = LaneTier(ttl_s=self.settings.lane_ttl_s)
        reuse = PrefixReuse(engine, cache, lanes=lanes, tier=tier, clock=self.clock)
        scheduler = Scheduler(spec, lanes, reuse=reuse, limits=self.settings.limits())
        return Stepper(
            engine,
            scheduler,
            sampler=choose_sampler(
                kind, device=device, vocab_size=spec.geometry.vocab_size, lanes=spec.lanes
            ),
            outbox=self.replies,
            observer=self.metrics,
            clock=self.clock,
        )
