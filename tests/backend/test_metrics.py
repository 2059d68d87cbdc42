import logging
from collections import defaultdict

from backend.metrics import GAUGES_EVERY_S, MAX_REFUSAL_LINES, Load, Reading, RequestMetrics
from tests.backend.doubles import Rig


class Recorded:
    """Instruments that keep every value by (name, labels)."""

    def __init__(self) -> None:
        self.values = defaultdict(float)
        self.observed = defaultdict(list)

    def counter(self, name, description, labels):
        return _Metric(self, (name, tuple(sorted(labels.items()))))

    gauge = counter

    def histogram(self, name, description, labels, *, buckets):
        assert list(buckets) == sorted(buckets)
        return _Metric(self, (name, tuple(sorted(labels.items()))))

    def value(self, name, **labels):
        return self.values[name, tuple(sorted({"model": "m", **labels}.items()))]


class _Metric:
    def __init__(self, recorded, key):
        self._recorded, self._key = recorded, key

    def increment(self, amount):
        assert amount >= 0
        self._recorded.values[self._key] += amount

    def set(self, value):
        self._recorded.values[self._key] = value

    def observe(self, value):
        self._recorded.observed[self._key[0]].append(value)


def metered(readings=list):
    recorded = Recorded()
    rig = Rig()
    metrics = RequestMetrics(
        recorded, {"model": "m"}, release="abc", readings=readings, clock=lambda: rig.now
    )
    rig.stepper._observer = metrics
    return rig, metrics, recorded


def test_an_ended_request_is_counted_and_logged_once(caplog):
    caplog.set_level(logging.INFO)
    rig, metrics, recorded = metered()
    rig.ask([3, 4, 5, 6, 7], max_tokens=4, received=0.0)
    rig.now = 0.5
    rig.step()
    rig.now = 2.0
    rig.run()
    metrics.publish()
    metrics.publish()
    assert recorded.value("requests_total", reason="length") == 1
    assert recorded.value("input_tokens_total") == 5
    assert recorded.value("output_tokens_total") == 4
    assert recorded.observed["ttft_seconds"] == [0.5]
    assert recorded.observed["tpot_seconds"] == [0.5]
    lines = [record.message for record in caplog.records if record.message.startswith("request ")]
    assert lines == [
        "request id=- release=abc input=5 output=4 cached=0 ttft_ms=500.0 total_ms=2000.0 reason=length"
    ]


def test_a_request_without_a_token_has_no_ttft():
    rig, metrics, recorded = metered()
    rig.ask([3, 4], deadline=1.0)
    rig.now = 2.0
    rig.run()
    metrics.publish()
    assert recorded.value("requests_total", reason="deadline") == 1
    assert not recorded.observed["ttft_seconds"]


def test_a_refused_request_is_counted_twice_over_and_logged_once(caplog):
    caplog.set_level(logging.INFO)
    _, metrics, recorded = metered()
    metrics.refused("a\nrequest id=forged", reason="InvalidRequest")
    metrics.refused("", reason="Overloaded")
    metrics.publish()
    assert recorded.value("requests_total", reason="InvalidRequest") == 1
    assert recorded.value("requests_refused_total", reason="InvalidRequest") == 1
    assert recorded.value("requests_refused_total", reason="Overloaded") == 1
    assert [record.message for record in caplog.records] == [
        "request id='a\\nrequest id=forged' release=abc refused reason=InvalidRequest",
        "request id=- release=abc refused reason=Overloaded",
    ]


def test_a_flood_of_refusals_is_counted_and_not_written(caplog):
    caplog.set_level(logging.INFO)
    rig, metrics, recorded = metered()
    for _ in range(1_000):
        metrics.refused("", reason="AccessDenied")
    metrics.publish()
    assert recorded.value("requests_refused_total", reason="AccessDenied") == 1_000
    assert len(caplog.records) == MAX_REFUSAL_LINES + 1
    left_out = 1_000 - MAX_REFUSAL_LINES
    assert caplog.records[-1].message == f"{left_out} more requests refused: too many for a line each"
    rig.now += GAUGES_EVERY_S
    metrics.publish()
    metrics.refused("next", reason="AccessDenied")
    metrics.publish()
    assert "id=next" in caplog.records[-1].message


def test_a_full_queue_is_a_refusal_and_a_probe_is_no_news():
    rig, metrics, recorded = metered()
    for _ in range(68):
        rig.ask([3, 4], max_tokens=1)
    rig.ask([3, 4], max_tokens=1)
    rig.ask([3, 4], max_tokens=1, probe=True)
    metrics.publish()
    assert recorded.value("requests_refused_total", reason="Overloaded") == 1
    rig.run()
    rig.ask([3, 4], max_tokens=1, probe=True)
    rig.run()
    metrics.publish()
    assert recorded.value("requests_total", reason="length") == 68


def test_totals_kept_elsewhere_grow_and_gauges_follow():
    totals = {"lane": 5.0}

    def readings():
        return [
            Reading("hit_tokens_total", totals["lane"], "lane"),
            Reading("cache_pins", totals["lane"] - 5),
        ]

    rig, metrics, recorded = metered(readings)
    metrics.load = lambda: Load(requests_waiting=3, kv_tokens_capacity=80)
    metrics.publish()
    totals["lane"] = 9.0
    metrics.publish()
    assert recorded.value("hit_tokens_total", tier="lane") == 5, "published twice within a second"
    rig.now = 1.5
    metrics.publish()
    assert recorded.value("hit_tokens_total", tier="lane") == 9
    assert recorded.value("cache_pins") == 4
    assert recorded.value("requests_waiting") == 3
    assert recorded.value("kv_tokens_capacity") == 80


def test_load_counts_what_waits_and_what_is_written():
    rig = Rig()
    rig.ask(list(range(2, 34)), cached=False, max_tokens=2)
    rig.ask([5, 6, 7], cached=False, max_tokens=2)
    assert rig.scheduler.load().requests_waiting == 2
    assert rig.scheduler.load().queued_prefill_tokens == 35
    rig.step()
    load = rig.scheduler.load()
    assert (load.requests_waiting, load.requests_running) == (0, 2)
    assert (load.kv_tokens_used, load.queued_prefill_tokens) == (16, 19)
    assert load.kv_tokens_capacity == 4 * 64


def test_swaps_are_counted_by_outcome_and_refusals_once_more():
    _, metrics, recorded = metered()
    for outcome in ("ok", "digest", "ok"):
        metrics.swapped(outcome)
    metrics.publish()
    assert recorded.value("swaps_total", reason="ok") == 2
    assert recorded.value("swaps_total", reason="digest") == 1
    assert recorded.value("swap_refusals_total", reason="digest") == 1
    assert recorded.value("swap_refusals_total", reason="ok") == 0
