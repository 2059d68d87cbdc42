"""Verdicts over rounds of probes: what is busy, what is dead, and who is to blame."""

import pytest

from scripts.liveness import AWAKE_TIMES, Liveness
from scripts.triton_http import ProbeResult

TOKEN = ProbeResult(alive=True, busy=False, timed_out=False, seconds=0.1, detail="one token")
SLOW = ProbeResult(alive=True, busy=False, timed_out=False, seconds=1.9, detail="one token")
BUSY = ProbeResult(alive=True, busy=True, timed_out=False, seconds=0.1, detail="queue is full")
LATE = ProbeResult(alive=False, busy=False, timed_out=True, seconds=2.0, detail="no token within 2 s")
ERROR = ProbeResult(alive=False, busy=False, timed_out=False, seconds=0.1, detail="stub is not healthy")
STUCK = ProbeResult(False, False, False, 0.1, detail="the backend is stuck: step-loop hangs", stuck=True)
STILL = 'tensorcache_kv_tokens_used{model="m"} 5\n'


def judge(rounds: list[dict[str, ProbeResult]], pages: list[str | None]) -> list[list[str]]:
    liveness = Liveness(patience=3, limit_s=2.0)
    liveness.targets = {"m_sync": "m"}
    liveness.judge({"m": TOKEN, "m_sync": TOKEN}, STILL)
    return [liveness.judge(probes, page) for probes, page in zip(rounds, pages, strict=True)]


@pytest.mark.parametrize(
    "line",
    [
        'tensorcache_output_tokens_total{{model="m",version="1"}} {}',
        'tensorcache_kv_tokens_used{{model="m",version="1"}} {}',
        'tensorcache_ttft_seconds_count{{model="m",version="1"}} {}',
        'tensorcache_tpot_seconds_count{{model="m",version="1"}} {}',
    ],
)
@pytest.mark.parametrize("answer", [LATE, BUSY])
def test_work_that_moves_is_life(line: str, answer: ProbeResult) -> None:
    assert judge([{"m": answer}] * 6, [line.format(count) for count in range(6)]) == [[]] * 6


@pytest.mark.parametrize(
    "line",
    [
        'tensorcache_requests_total{{model="m",reason="cancelled"}} {}',
        'tensorcache_requests_waiting{{model="m"}} {}',
        'tensorcache_queued_prefill_tokens{{model="m"}} {}',
        'tensorcache_cache_foreign_blocks{{model="m"}} {}',
        'tensorcache_output_tokens_total{{model="other"}} {}',
    ],
)
@pytest.mark.parametrize("answer", [LATE, BUSY])
def test_what_moves_in_front_of_a_hung_engine_is_no_work(line: str, answer: ProbeResult) -> None:
    pages = [STILL + line.format(count) for count in range(3)]
    assert judge([{"m": answer}] * 3, pages) == [[], [], ["m"]]


def test_errors_are_death_whatever_moves() -> None:
    pages = [f'tensorcache_output_tokens_total{{model="m"}} {count}' for count in range(3)]
    assert judge([{"m": ERROR}] * 3, pages) == [[], [], ["m"]]


def test_one_token_begins_the_count_anew() -> None:
    rounds = [{"m": LATE}, {"m": LATE}, {"m": TOKEN}, {"m": LATE}, {"m": LATE}, {"m": LATE}]
    assert judge(rounds, [STILL] * 2 + ["", *[STILL] * 3])[:5] == [[]] * 5


def test_pages_that_cannot_be_read_excuse_for_as_long_as_a_death_takes() -> None:
    assert judge([{"m": LATE}] * 6, [None] * 6) == [[]] * 5 + [["m"]]
    assert judge([{"m": BUSY}] * 9, [None] * 9) == [[]] * 9


def test_a_page_without_the_model_is_no_excuse() -> None:
    assert judge([{"m": LATE}] * 3, [""] * 3) == [[], [], ["m"]]


@pytest.mark.parametrize("decoder", [SLOW, BUSY, LATE])
def test_a_late_facade_of_a_busy_decoder_is_excused(decoder: ProbeResult) -> None:
    pages = [f'tensorcache_kv_tokens_used{{model="m"}} {count}' for count in range(6)]
    assert judge([{"m": decoder, "m_sync": LATE}] * 6, pages) == [[]] * 6


@pytest.mark.parametrize("facade", [LATE, ERROR])
def test_a_facade_that_fails_before_an_idle_decoder_is_dead(facade: ProbeResult) -> None:
    assert judge([{"m": TOKEN, "m_sync": facade}] * 3, [STILL] * 3) == [[], [], ["m_sync"]]


def test_errors_of_a_facade_count_while_its_decoder_is_busy() -> None:
    pages = [f'tensorcache_kv_tokens_used{{model="m"}} {count}' for count in range(3)]
    assert judge([{"m": LATE, "m_sync": ERROR}] * 3, pages) == [[], [], ["m_sync"]]


def test_a_late_facade_that_answers_others_is_alive() -> None:
    pages = [f'nv_inference_request_success{{model="m_sync",version="1"}} {count}' for count in range(6)]
    assert judge([{"m": TOKEN, "m_sync": LATE}] * 6, pages) == [[]] * 6


@pytest.mark.parametrize("facade", [LATE, ERROR])
def test_a_facade_is_not_blamed_for_a_decoder_that_hangs_or_is_away(facade: ProbeResult) -> None:
    assert judge([{"m": LATE, "m_sync": facade}] * 3, [STILL] * 3) == [[], [], ["m"]]
    assert judge([{"m_sync": facade}] * 3, [STILL] * 3) == [[]] * 3


def test_a_model_that_was_loaded_again_begins_anew() -> None:
    liveness = Liveness(patience=1, limit_s=2.0)
    assert liveness.judge({"m": ERROR}, STILL) == ["m"]
    liveness.forget("m")
    assert liveness.judge({"m": TOKEN}, STILL) == []


def test_a_model_that_says_it_is_stuck_is_dead_at_once_and_its_facade_is_not_blamed() -> None:
    pages = [f'tensorcache_output_tokens_total{{model="m"}} {count}' for count in range(2)]
    assert judge([{"m": TOKEN, "m_sync": TOKEN}, {"m": STUCK, "m_sync": STUCK}], pages) == [[], ["m"]]


@pytest.mark.parametrize("answer", [LATE, BUSY])
def test_a_late_model_whose_watchdog_is_awake_is_excused_for_long_but_not_for_ever(
    answer: ProbeResult,
) -> None:
    rounds = 3 * AWAKE_TIMES
    pages = [STILL + f'tensorcache_heartbeats_total{{model="m"}} {count}' for count in range(1, rounds + 1)]
    assert judge([{"m": answer}] * rounds, pages) == [*([[]] * (rounds - 1)), ["m"]]


def test_an_awake_watchdog_excuses_no_error() -> None:
    pages = [STILL + f'tensorcache_heartbeats_total{{model="m"}} {count}' for count in range(1, 4)]
    assert judge([{"m": ERROR}] * 3, pages) == [[], [], ["m"]]


def test_a_watchdog_that_fell_silent_excuses_nothing() -> None:
    page = STILL + 'tensorcache_heartbeats_total{model="m"} 7'
    assert judge([{"m": LATE}] * 4, [page] * 4) == [[], [], ["m"], ["m"]]


def test_doubt_lasts_until_a_token_comes() -> None:
    liveness = Liveness(patience=3, limit_s=2.0)
    seen = []
    for answer in (TOKEN, LATE, TOKEN):
        liveness.judge({"m": answer}, STILL)
        seen.append(liveness.in_doubt)
    assert seen == [False, True, False]
