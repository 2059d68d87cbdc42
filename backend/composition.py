"""The composition root: the one place that names implementations and wires a decoder together.

    settings → verified release → engine (warm, golden token answered) → cache → threads

Any step that refuses raises; whatever was opened before it is closed again, so that a failed load leaves
nothing behind.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from backend.access import Authoriser
from backend.generation import Generation, ReplySink
from backend.metrics import Instruments, Reading, RequestMetrics
from backend.no_cache import NoCache
from backend.parsing import RequestLimits, parse_generation
from backend.parsing.limits import FORWARDED_HEADERS
from backend.prefix_reuse import PrefixReuse
from backend.replies import Replies
from backend.sampling import NumpySampler
from backend.scheduler import Scheduler
from backend.sequence import Sequence, open_sequence
from backend.service import DecoderService
from backend.settings import ModelSettings, NodeSettings
from backend.step_loop import StepLoop
from backend.stepper import Stepper
from backend.text import TextModel
from cachemgr import BlockFormat, CacheSecrets, LaneTier, PrefixCache, open_cache
from engines import Engine, EngineManifest, EngineSpec, LanePool, load_release, open_engine

MIN_PROMPT_BYTES = 64 * 1024
PROMPT_BYTES_PER_TOKEN = 32

HOST = "host"

Clock = Callable[[], float]


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
    release = load_release(version_dir, model=model, trust=node.trust)
    manifest = release.manifest
    text = TextModel.from_release(
        release.files,
        chat_template=manifest.chat_template,
        eos_token_ids=manifest.eos_token_ids,
        bos_token_id=manifest.bos_token_id,
        add_bos=manifest.add_bos,
    )
    with ExitStack() as undo:
        engine = open_engine(release, settings.engine_options())
        del release  # the engine has its own copy of the weights
        undo.callback(engine.close)
        cache = open_prefix_cache(engine.spec, manifest, settings=settings, node=node)
        undo.callback(cache.close)
        service = wire(
            engine,
            cache,
            text=text,
            settings=settings,
            authoriser=authoriser,
            instruments=instruments,
            labels=labels,
            forwarded_headers=node.forwarded_headers,
        )
        undo.pop_all()
    return service


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
    return open_cache(block_format, node.cache, CacheSecrets.load(node.secrets_dir))


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
    """Everything between a request and the engine, started."""
    spec = engine.spec
    lanes = LanePool(spec)
    tier = LaneTier(ttl_s=settings.lane_ttl_s)
    reuse = PrefixReuse(engine, cache, lanes=lanes, tier=tier, clock=clock)
    scheduler = Scheduler(spec, lanes, reuse=reuse, limits=settings.limits())
    sampler = NumpySampler(spec.geometry.vocab_size)

    def readings() -> list[Reading]:
        host = (Reading(name, value, HOST) for name, value in cache.counters().items())
        return [*reuse.readings(), Reading("integrity_failures_total", float(loop.integrity_failures)), *host]

    metrics = RequestMetrics(instruments, labels, release=spec.digest[:16], readings=readings, clock=clock)
    replies = Replies(cancel=lambda ticket: loop.cancel(ticket), after_round=metrics.publish, clock=clock)
    stepper = Stepper(
        engine,
        scheduler,
        sampler=sampler,
        eos_token_ids=text.eos_token_ids,
        outbox=replies,
        observer=metrics,
        clock=clock,
    )

    def begin(ticket: int, request: Generation, sink: ReplySink) -> Sequence:
        row = sampler.row(
            request.sampling,
            request.prompt,
            min_tokens=request.min_tokens,
            eos_token_ids=text.eos_token_ids,
            logprobs=request.logprobs,
        )
        out = text.stream(request.stop_words, min_tokens=request.min_tokens)
        return open_sequence(ticket, request, sink=sink, text=out, row=row, max_seq_len=spec.max_seq_len)

    loop = StepLoop(stepper, begin, max_inbox=settings.max_queue_size + spec.lanes, clock=clock)
    metrics.load = lambda: loop.load
    limits = RequestLimits(
        max_seq_len=spec.max_seq_len,
        vocab_size=spec.geometry.vocab_size,
        default_max_tokens=settings.default_max_tokens,
        max_prompt_bytes=max(MIN_PROMPT_BYTES, PROMPT_BYTES_PER_TOKEN * spec.max_seq_len),
        forwarded_headers=forwarded_headers,
    )
    parse = partial(parse_generation, limits=limits, text=text, hasher=cache.hashes, clock=clock)
    return DecoderService(
        parse=parse,
        authoriser=authoriser,
        loop=loop,
        replies=replies,
        engine=engine,
        cache=cache,
        observer=metrics,
        drain_s=settings.drain_s,
    )
