"""Doubles for scheduling logic: an engine whose next token depends on every KV it finds, a dict as cache."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from backend.generation import Delta, Generation, SamplingParams
from backend.prefill_cost import PrefillCost
from backend.prefix_reuse import PrefixReuse
from backend.sampling import NumpySampler
from backend.scheduler import Scheduler, SchedulerLimits
from backend.sequence import Sequence as Running
from backend.sequence import open_sequence
from backend.stepper import Stepper
from cachemgr import LaneTier
from engines import EngineSpec, Geometry, LaneId, LanePool, Logits, StepError

BLOCK = 4
VOCAB = 64
EOS = 1


def mix(before: int, token: int) -> int:
    """KV of a position: depends on the whole prefix, fits a float64 exactly."""
    return (before * 6364136223 + (token + 1) * 1442695041 + 12345) % (1 << 31)


def next_token(kv: Sequence[int]) -> int:
    """What a sound engine says after this KV: any wrong position changes it."""
    total = 0
    for value in kv:
        total = (total * 31 + int(value)) % (1 << 61)
    return 2 + total % (VOCAB - 2)


def expected_text_ids(prompt: Sequence[int], count: int) -> list[int]:
    """The answer of a lone run without cache."""
    kv: list[int] = []
    tokens = list(prompt)
    out: list[int] = []
    for _ in range(count):
        for token in tokens[len(kv) :]:
            kv.append(mix(kv[-1] if kv else 7, token))
        out.append(next_token(kv))
        tokens.append(out[-1])
    return out


class FakeEngine:
    """Keeps a number per position; `fail_on` makes chosen calls raise StepError."""

    def __init__(self, *, lanes: int = 4, max_seq_len: int = 64, max_prefill_tokens: int = 32) -> None:
        self.spec = EngineSpec(
            model="fake",
            release=1,
            digest="f" * 64,
            kv_identity=b"k" * 16,
            geometry=Geometry(layers=1, hidden=1, query_heads=1, kv_heads=1, head_dim=1, vocab_size=VOCAB),
            kv_dtype=np.dtype(np.float32),
            block_tokens=BLOCK,
            lanes=lanes,
            max_seq_len=max_seq_len,
            positions=max_seq_len + BLOCK,
            max_prefill_tokens=max_prefill_tokens,
            exact=True,
        )
        self.kv = np.full((lanes, self.spec.positions), -1, dtype=np.int64)
        self.calls: list[tuple[str, int]] = []
        self.prefilled_tokens = 0
        self.fail_on: set[str] = set()
        self.closed = False

    def prefill(self, lane, tokens, start):
        self._maybe_fail("prefill")
        assert 1 <= len(tokens) <= self.spec.max_prefill_tokens
        assert start + len(tokens) <= self.spec.max_seq_len
        self.calls.append(("prefill", len(tokens)))
        self.prefilled_tokens += len(tokens)
        for offset, token in enumerate(tokens.tolist()):
            self._write(lane, token, start + offset)
        return self._logits([(lane, start + len(tokens))])

    def decode(self, lanes, tokens, positions):
        self._maybe_fail("decode")
        assert len(set(lanes)) == len(lanes)
        self.calls.append(("decode", len(lanes)))
        for lane, token, position in zip(lanes, tokens.tolist(), positions.tolist(), strict=True):
            assert position < self.spec.max_seq_len
            self._write(lane, token, position)
        return self._logits(list(zip(lanes, (positions + 1).tolist(), strict=True)))

    def export_blocks(self, lane, blocks, out):
        self._maybe_fail("export")
        for block, buffer in zip(blocks, out, strict=True):
            buffer.view(np.int64)[:] = self.kv[lane, block * BLOCK : (block + 1) * BLOCK]

    def import_blocks(self, lane, blocks, payloads):
        self._maybe_fail("import")
        for block, payload in zip(blocks, payloads, strict=True):
            self.kv[lane, block * BLOCK : (block + 1) * BLOCK] = payload.view(np.int64)

    def prewarm(self):
        return iter(())

    def adopt_kv(self, previous):
        self.kv, previous.closed = previous.kv, True

    def close(self):
        self.closed = True

    def _write(self, lane: LaneId, token: int, position: int) -> None:
        before = int(self.kv[lane, position - 1]) if position else 7
        self.kv[lane, position] = mix(before, token)

    def _logits(self, rows: list[tuple[int, int]]) -> Logits:
        array = np.zeros((len(rows), VOCAB), dtype=np.float32)
        for row, (lane, valid) in enumerate(rows):
            array[row, next_token(self.kv[lane, :valid].tolist())] = 10.0
        return Logits(array)

    def _maybe_fail(self, call: str) -> None:
        if call in self.fail_on:
            self.fail_on.discard(call)
            raise StepError(f"injected {call} failure")


@dataclass
class DictLease:
    cache: "DictCache"
    names: list[bytes]
    ready: bool = True
    released: bool = False

    @property
    def blocks(self) -> int:
        return len(self.names)

    def release(self) -> None:
        if not self.released:
            self.released = True
            self.cache.pins -= 1


@dataclass
class DictPending:
    name: bytes
    payload: np.ndarray


class DictCache:
    """PrefixCache in a dict; `broken` makes every call raise, `full` refuses new blocks."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, np.ndarray] = {}
        self.pins = 0
        self.pending = 0
        self.restored = 0
        self.broken = False
        self.full = False
        self.leases_ready = True
        self.leases: list[DictLease] = []
        self.deadlines: list[float] = []

    def public_blocks(self, tokens, *, salt=""):
        return 0

    def set_public(self, prefixes):
        pass

    def set_shares(self, shares):
        pass

    def usage(self):
        return {}

    def hashes(self, tokens, *, namespace, salt="", public=0):
        self._check()
        chain, out = f"{namespace}|{salt}".encode(), []
        for block in range(len(tokens) // BLOCK):
            part = np.asarray(tokens[block * BLOCK : (block + 1) * BLOCK]).astype("<i8").tobytes()
            chain = hashlib.blake2b(chain + part, digest_size=16).digest()
            out.append(chain)
        return out

    def lookup(self, hashes):
        count = 0
        while count < len(hashes) and hashes[count] in self.blocks:
            count += 1
        return count

    def acquire(self, hashes, *, deadline, block_s=None, namespace=""):
        self._check()
        self.deadlines.append(deadline)
        self.pins += 1
        lease = DictLease(self, list(hashes[: self.lookup(hashes)]), ready=self.leases_ready)
        self.leases.append(lease)
        return lease

    def restore(self, lease, *, first, sink):
        self._check()
        assert lease.ready
        assert not lease.released
        usable = first
        for index in range(first, lease.blocks):
            payload = self.blocks.get(lease.names[index])
            if payload is None:
                break
            sink(range(index, index + 1), [payload.copy()])
            usable += 1
            self.restored += 1
        return usable

    def prepare(self, hashes, index, *, namespace=""):
        self._check()
        if self.full or hashes[index] in self.blocks:
            return None
        self.pending += 1
        return DictPending(hashes[index], np.zeros(BLOCK * 8, dtype=np.uint8))

    def commit(self, pending):
        self.pending -= 1
        self.blocks[pending.name] = pending.payload

    def abort(self, pending):
        self.pending -= 1

    def counters(self):
        return {}

    def close(self):
        pass

    def _check(self) -> None:
        if self.broken:
            raise RuntimeError("cache is broken")


@dataclass
class Collected:
    """A reply sink that remembers."""

    deltas: list[Delta] = field(default_factory=list)

    def emit(self, delta: Delta) -> None:
        assert not self.ended, "a delta after the last one"
        self.deltas.append(delta)

    @property
    def ended(self) -> bool:
        return bool(self.deltas) and (self.deltas[-1].finish is not None or self.deltas[-1].error is not None)

    @property
    def ids(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def last(self) -> Delta:
        assert self.ended, "not ended"
        return self.deltas[-1]


class NumberText:
    """Writes each token as `<id>`; stops at `stop`."""

    def __init__(self, stop: int | None = None) -> None:
        self.stopped = False
        self._stop = stop

    def push(self, token: int) -> str:
        if token == self._stop:
            self.stopped = True
            return ""
        return f"<{token}>"

    def finish(self) -> str:
        return ""


class DirectOutbox:
    """Calls the sinks on the spot: no replies thread."""

    def deliver(self, batch):
        for sink, delta in batch:
            sink.emit(delta)


class Silent:
    """An observer that only counts outcomes."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []

    def ended(self, seq: Running, *, outcome: str, now: float) -> None:
        self.outcomes.append(outcome)

    def refused(self, request_id: str, *, reason: str) -> None:
        self.outcomes.append(reason)


def generation(
    prompt: Sequence[int],
    *,
    max_tokens: int = 8,
    cache: DictCache | None = None,
    received: float = 0.0,
    deadline: float | None = None,
    stream: bool = True,
    salt: str = "",
    seed: int = 0,
    temperature: float = 0.0,
    probe: bool = False,
    release: str = "abc",
    principal: str = "",
) -> Generation:
    tokens = np.array(prompt, dtype=np.int64)
    hashes = cache.hashes(tokens, namespace="default", salt=salt) if cache is not None else []
    return Generation(
        request_id="",
        prompt=tokens,
        block_hashes=hashes,
        namespace="default",
        sampling=SamplingParams(seed=seed, temperature=temperature),
        max_tokens=max_tokens,
        min_tokens=0,
        stop_words=(),
        ignore_eos=True,
        stream=stream,
        echo=False,
        logprobs=False,
        reads_cache=cache is not None,
        writes_cache=cache is not None,
        received=received,
        deadline=deadline,
        cache_salt=salt,
        probe=probe,
        release=release,
        principal=principal,
    )


class Rig:
    """A stepper over the fake engine, driven by hand; `now` is its clock."""

    def __init__(
        self, *, engine=None, cache=None, limits=None, lane_ttl_s=0.0, sampler=None, outbox=None
    ) -> None:
        self.now = 0.0
        self.engine = engine or FakeEngine()
        self.cache = DictCache() if cache is None else cache
        self.lanes = LanePool(self.engine.spec)
        self.tier = LaneTier(ttl_s=lane_ttl_s)
        self.cost = PrefillCost()
        self.reuse = PrefixReuse(
            self.engine, self.cache, lanes=self.lanes, tier=self.tier, cost=self.cost, clock=lambda: self.now
        )
        small = SchedulerLimits(max_queue_size=64, prefill_chunk_tokens=8, idle_chunk_tokens=16)
        self.limits = limits or small
        self.scheduler = Scheduler(self.engine.spec, self.lanes, reuse=self.reuse, limits=self.limits)
        self.sampler = sampler or NumpySampler(VOCAB)
        self.observer = Silent()
        self.stepper = Stepper(
            self.engine,
            self.scheduler,
            sampler=self.sampler,
            outbox=outbox or DirectOutbox(),
            observer=self.observer,
            cost=self.cost,
            clock=lambda: self.now,
        )
        self._ticket = 0

    def open(self, ticket, request, sink, *, stop=None):
        row = self.sampler.row(
            request.sampling,
            request.prompt,
            min_tokens=request.min_tokens,
            eos_token_ids=[EOS],
            logprobs=request.logprobs,
        )
        room = self.engine.spec.max_seq_len
        return open_sequence(
            ticket, request, sink=sink, text=NumberText(stop), row=row, eos=frozenset([EOS]), max_seq_len=room
        )

    def ask(self, prompt, *, stop=None, cached=True, **options) -> tuple[int, Collected]:
        sink = Collected()
        self._ticket += 1
        request = generation(prompt, cache=self.cache if cached else None, **options)
        self.stepper.submit(self.open(self._ticket, request, sink, stop=stop))
        self.stepper.flush()
        return self._ticket, sink

    def step(self) -> None:
        self.stepper.step()
        self.scheduler.check_integrity()

    def run(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not self.stepper.busy:
                break
            self.step()
        assert not self.stepper.busy, "still busy"
        self.check_idle()

    def check_idle(self) -> None:
        self.scheduler.check_integrity()
        assert self.lanes.active == 0
        assert self.cache.pins == 0
        assert self.cache.pending == 0
