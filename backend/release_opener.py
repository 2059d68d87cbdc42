"""Opens releases: the whole load chain, an engine, its cache and its text side, at load and for each swap.

Any step that refuses raises; whatever was opened before it is closed again, so that a failed load leaves
nothing behind. What the release before has already goes on where it can: lanes, cache, text model.
"""

from contextlib import ExitStack
from functools import partial
from pathlib import Path

from backend.gpu_memory import GpuMemory
from backend.no_cache import NoCache
from backend.open_release import OpenRelease
from backend.process import HOST_DEVICE, Process
from backend.settings import NodeSettings
from backend.text import TextModel
from cachemgr import Beyond, BlockFormat, CacheSecrets, PrefixCache, open_cache
from engines import (
    EngineManifest,
    EngineSpec,
    Runner,
    VerifiedRelease,
    device_memory_use,
    load_release,
    open_engine,
    open_page_locker,
    shares_kv,
)

GPU_RUNTIME = "tensorrt"


class ReleaseOpener:
    """Runs the whole load chain, from the signature to the golden token, and opens what passes it."""

    def __init__(
        self, model: str, version_dir: Path, *, node: NodeSettings, beyond: Beyond, process: Process
    ) -> None:
        self._model = model
        self._version_dir = version_dir
        self._node = node
        self._beyond = beyond
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
                cache = self._open_cache(spec, manifest)
                undo.callback(cache.close)
                self._process.tenancy.adopt(cache)
                opened = self._process.assemble(engine, cache, text=text, device=device)
            undo.pop_all()
        self._text = _text_facts(manifest), text
        opened.facts = facts
        if manifest.runtime == GPU_RUNTIME:
            self._process.ledger.open(self, self._gpu_memory.readings)
        return opened

    def _open_cache(self, spec: EngineSpec, manifest: EngineManifest) -> PrefixCache:
        """The host tier for this engine's identity and what is behind it, or the null cache."""
        settings, node = self._process.settings, self._node
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
        secrets = CacheSecrets.load(node.secrets.dir, group=node.secrets.group, grace_s=node.secrets.grace_s)
        pins = open_page_locker(manifest.runtime, device=settings.device)
        return open_cache(block_format, node.cache, secrets, pins=pins, remote=self._beyond.tiers)

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
