"""Tells a busy model from a dead one: a late answer is death only while the model's own work stands still.

A decoder with a long queue answers a probe late, or says that it has no room, and is as healthy as can be:
its tokens move. One whose engine hangs has a watchdog that says so after a few seconds; that is believed at
once. One whose process is frozen says nothing, and nothing of it moves, not even the watchdog's heartbeats:
while those move, a late answer is excused for minutes. A facade does no work of its own: it waits for its
decoder, so it is blamed only for what its decoder would have done better.

Invariants
- Requests received, queued or cancelled are no work: they go on in front of a hung engine.
- A metrics page that cannot be read is no proof of death, for as many rounds as a death takes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from scripts.triton_http import ProbeResult

_WORK: Final = tuple(
    f"tensorcache_{name}{{"
    for name in ("output_tokens_total", "kv_tokens_used", "ttft_seconds_count", "tpot_seconds_count")
)
_AWAKE: Final = "tensorcache_heartbeats_total{"
AWAKE_TIMES: Final = 40
"""Long enough to load a large model while requests wait for it."""

_ANSWERED: Final = ("nv_inference_request_success{", "nv_inference_request_failure{")


@dataclass(slots=True)
class _Record:
    """What is known about one model."""

    failures: int = 0
    unread: int = 0
    work: frozenset[str] = frozenset()
    beats: frozenset[str] = frozenset()
    awake: bool = False


class Liveness:
    """Judges rounds of probes. `targets` names the decoder behind each facade."""

    def __init__(self, *, patience: int, limit_s: float) -> None:
        """`patience` bad rounds in a row make a model dead; `limit_s` is what a probe may take.

        AWAKE_TIMES as many if it is only late and its watchdog is awake; one if it says that it is stuck.
        """
        self.targets: Mapping[str, str] = {}
        self._patience = patience
        self._prompt_s = limit_s / 2
        self._records: dict[str, _Record] = {}

    def forget(self, model: str) -> None:
        """Begin anew: it was loaded again. What its counters said still stands."""
        record = self._record(model)
        record.failures = record.unread = 0

    @property
    def in_doubt(self) -> bool:
        """The last round was bad for a model: look again soon."""
        return any(record.failures for record in self._records.values())

    def judge(self, probes: Mapping[str, ProbeResult], page: str | None) -> list[str]:
        """The models that are dead now. `page`: the metrics; None: Triton is there but gave no page."""
        moved = {model: self._moved(model, page, busy=probes[model].busy) for model in probes}
        dead = []
        for model in probes:
            verdict = self._is_well(model, probes, moved)
            record = self._record(model)
            if verdict is not None:
                record.failures = 0 if verdict else record.failures + 1
            if record.failures >= self._patience_with(model, probes[model]):
                dead.append(model)
        return dead

    def _patience_with(self, model: str, result: ProbeResult) -> int:
        if model in self.targets:
            return self._patience
        if result.stuck:
            return 1
        late = result.busy or result.timed_out
        return self._patience * AWAKE_TIMES if late and self._record(model).awake else self._patience

    def _is_well(
        self, model: str, probes: Mapping[str, ProbeResult], moved: Mapping[str, bool]
    ) -> bool | None:
        """None: this round says nothing about the model."""
        result = probes[model]
        if model not in self.targets:
            return moved[model] if result.busy or result.timed_out else result.alive
        if result.alive:
            return True
        target = self.targets[model]
        decoder = probes.get(target)
        if decoder is None or not (decoder.alive or (decoder.timed_out and moved[target])):
            return None  # its decoder is away or in trouble: that is repaired first
        if not result.timed_out:
            return False
        idle = decoder.alive and not decoder.busy and decoder.seconds <= self._prompt_s
        return moved[model] or not idle

    def _moved(self, model: str, page: str | None, *, busy: bool) -> bool:
        """Did its work go on since the last round?"""
        record = self._record(model)
        if page is None:
            record.unread += 1
            record.awake = False
            return busy or record.unread <= self._patience
        record.unread = 0
        names = _ANSWERED if model in self.targets else _WORK
        label = f'model="{model}"'
        lines = [line for line in page.splitlines() if label in line]
        beats = frozenset(line for line in lines if line.startswith(_AWAKE))
        record.awake, record.beats = bool(beats) and beats != record.beats, beats
        now = frozenset(line for line in lines if line.startswith(names))
        before, record.work = record.work, now
        return bool(now) and now != before

    def _record(self, model: str) -> _Record:
        return self._records.setdefault(model, _Record())
