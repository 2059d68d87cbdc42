"""What a decoder has once, whichever release serves: settings, metrics, replies, and what hangs on them.

Process.around          before any release is open
Process.assemble        puts a release together around an engine
Process.start_serving   the step loop, the door and the watchdog for the first one
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from backend.access import Access
from backend.admin import Administrator
from backend.admission import Admission
from backend.ledger import Ledger
from backend.metrics import Instruments, Reading, RequestMetrics
from backend.open_release import OpenRelease
from backend.parsing import RequestLimits
from backend.prefill_cost import PrefillCost
from backend.prefix_reuse import PrefixReuse
from backend.replies import Replies
from backend.sampling import choose_sampler
from backend.scheduler import Scheduler
from backend.settings import ModelSettings
from backend.step_loop import StepLoop
from backend.stepper import Stepper
from backend.tenancy import Tenancy
from backend.text import TextModel
from backend.watchdog import Watchdog
from cachemgr import LaneTier, PrefixCache
from engines import Engine, LanePool

MIN_PROMPT_BYTES = 64 * 1024
PROMPT_BYTES_PER_TOKEN = 32

HOST_DEVICE = "cpu"

Clock = Callable[[], float]
Parts = tuple[StepLoop, Admission, Watchdog]


@dataclass(slots=True)
class Process:
    """What there is once, whichever release serves: settings, metrics, replies, and what hangs on them."""

    settings: ModelSettings
    metrics: RequestMetrics
    replies: Replies
    ledger: Ledger
    forwarded_headers: frozenset[str]
    clock: Clock
    tenancy: Tenancy = field(default_factory=Tenancy)
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
                serving = loop.serving
                found.append(Reading("serving_release", float(serving.spec.release) if serving else 0.0))
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
        return cls(settings, metrics, replies, ledger, forwarded_headers, clock, parts=parts)

    def start_serving(self, serving: OpenRelease, access: Access, admin: Administrator) -> Parts:
        """The step loop, the door and the watchdog, ready to be started by the service."""
        settings = self.settings
        access.allowances.bound(settings.max_queue_size + serving.spec.lanes)
        loop = StepLoop(serving, max_inbox=settings.max_queue_size + serving.spec.lanes, clock=self.clock)
        admission = Admission(
            loop,
            replies=self.replies,
            access=access,
            admin=admin,
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
            max_prompt_bytes=self.settings.max_prompt_bytes
            or max(MIN_PROMPT_BYTES, PROMPT_BYTES_PER_TOKEN * spec.max_seq_len),
            forwarded_headers=self.forwarded_headers,
        )
        own = stepper or self._stepper(engine, cache, device)
        return OpenRelease(engine, cache, text=text, stepper=own, limits=limits, ledger=self.ledger)

    def _stepper(self, engine: Engine, cache: PrefixCache, device: str) -> Stepper:
        """Lanes of its own, and everything that decides about them."""
        spec, kind = engine.spec, self.settings.sampler
        lanes = LanePool(spec)
        tier = LaneTier(ttl_s=self.settings.lane_ttl_s)
        cost = PrefillCost()
        reuse = PrefixReuse(engine, cache, lanes=lanes, tier=tier, cost=cost, clock=self.clock)
        scheduler = Scheduler(spec, lanes, reuse=reuse, limits=self.settings.limits())
        return Stepper(
            engine,
            scheduler,
            sampler=choose_sampler(
                kind, device=device, vocab_size=spec.geometry.vocab_size, lanes=spec.lanes
            ),
            outbox=self.replies,
            observer=self.metrics,
            cost=cost,
            clock=self.clock,
        )
