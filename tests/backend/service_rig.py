"""A whole decoder service without Triton: real engine, real cache, real text."""

import threading
import time
from dataclasses import dataclass, field

import numpy as np

from backend.access import open_access
from backend.admin import NoCommands
from backend.composition import wire
from backend.generation import Delta
from backend.settings import ModelSettings
from backend.text import TextModel
from cachemgr import BlockFormat, CacheSecrets, CacheSettings, open_cache
from engines.manifest import MANIFEST, parse_manifest

WAIT_S = 60.0


class SilentMetric:
    def increment(self, amount):
        pass

    def set(self, value):
        pass

    def observe(self, value):
        pass


class NoInstruments:
    def counter(self, name, description, labels):
        return SilentMetric()

    gauge = counter

    def histogram(self, name, description, labels, *, buckets):
        return SilentMetric()


@dataclass
class Caller:
    """A sender that remembers; `gone` makes it look like a caller that hung up."""

    deltas: list[Delta] = field(default_factory=list)
    finals: int = 0
    gone: bool = False
    first: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    times: list[float] = field(default_factory=list)

    def send(self, delta: Delta, *, final: bool) -> None:
        self.deltas.append(delta)
        self.times.append(time.monotonic())
        self.first.set()
        if final:
            self.finals += 1
            self.done.set()

    def cancelled(self) -> bool:
        return self.gone

    def wait(self) -> "Caller":
        assert self.done.wait(WAIT_S), "no last response in time"
        return self

    @property
    def last(self) -> Delta:
        return self.deltas[-1]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def ids(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def cached(self) -> int:
        assert self.last.usage is not None, self.last.error
        return self.last.usage.cached_tokens


class KeptEngine:
    """An engine that outlives its services and counts what it computes; `before_call` may raise."""

    def __init__(self, engine) -> None:
        self._engine = engine
        self.prefilled = 0
        self.longest_prefill = 0
        self.before_call = lambda kind: None

    @property
    def spec(self):
        return self._engine.spec

    def prefill(self, lane, tokens, start):
        self.before_call("prefill")
        self.prefilled += len(tokens)
        self.longest_prefill = max(self.longest_prefill, len(tokens))
        return self._engine.prefill(lane, tokens, start)

    def decode(self, lanes, tokens, positions):
        self.before_call("decode")
        return self._engine.decode(lanes, tokens, positions)

    def export_blocks(self, lane, blocks, out):
        self.before_call("export")
        self._engine.export_blocks(lane, blocks, out)

    def import_blocks(self, lane, blocks, payloads):
        self.before_call("import")
        self._engine.import_blocks(lane, blocks, payloads)

    def prewarm(self):
        return self._engine.prewarm()

    def adopt_kv(self, previous):
        self._engine.adopt_kv(previous)

    def close(self):
        pass


def text_model(release) -> TextModel:
    manifest = parse_manifest((release / MANIFEST).read_bytes())
    return TextModel.from_release(
        {"tokenizer.json": (release / "tokenizer.json").read_bytes()},
        chat_template=manifest.chat_template, eos_token_ids=manifest.eos_token_ids,
        bos_token_id=manifest.bos_token_id, add_bos=manifest.add_bos,
    )  # fmt: skip


def host_cache(spec, directory, *, host_bytes=256 << 20):
    block_format = BlockFormat(
        kv_identity=spec.kv_identity, dtype=spec.kv_dtype.name, layers=spec.geometry.layers,
        kv_heads=spec.geometry.kv_heads, head_dim=spec.geometry.head_dim, block_tokens=spec.block_tokens,
    )  # fmt: skip
    secrets = directory / "secrets"
    keys = CacheSecrets.load(secrets) if secrets.exists() else CacheSecrets.generate(secrets)
    return open_cache(block_format, CacheSettings(host_bytes=host_bytes, directory=str(directory)), keys)


class ServiceRig:
    """A running DecoderService and the ways to ask it."""

    def __init__(self, engine, cache, text, *, access=None, admin=None, **settings) -> None:
        self.engine = engine
        self.cache = cache
        self.service = wire(
            engine, cache, text=text, settings=ModelSettings(**settings),
            access=access or open_access("m"), admin=admin or NoCommands(),
            instruments=NoInstruments(), labels={"model": "test", "version": "1"},
        )  # fmt: skip

    def start(self, prompt, *, caller=None, parameters=None, **options) -> Caller:
        caller = caller or Caller()
        ids = isinstance(prompt, list)
        inputs = {"input_ids": np.array(prompt, np.int32)} if ids else {"text_input": text(prompt)}
        for name, value in options.items():
            inputs[name] = np.array([value], np.uint64) if name == "seed" else _tensor(value)
        self.service.handle("", lambda: inputs, parameters or {}, sender=lambda generation: caller)
        return caller

    def ask(self, prompt, **options) -> Caller:
        return self.start(prompt, **options).wait()

    def close(self) -> None:
        self.service.close()

    def __enter__(self) -> "ServiceRig":
        return self

    def __exit__(self, *failure) -> None:
        self.close()


def text(value: str) -> np.ndarray:
    return np.array([value.encode()], dtype=np.object_)


def _tensor(value) -> np.ndarray:
    if isinstance(value, bool):
        return np.array([value])
    if isinstance(value, float):
        return np.array([value], np.float32)
    if isinstance(value, list):
        return np.array([word.encode() for word in value], dtype=np.object_)
    if isinstance(value, str):
        return text(value)
    return np.array([value], np.int32)
