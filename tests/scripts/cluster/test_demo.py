"""What the demo of a cluster takes for a promise kept."""

import pytest

from scripts.cluster.demo import Step, judge
from scripts.cluster.figures import figure_of
from scripts.errors import RejectedError
from scripts.streamed_answer import StreamedAnswer

PAGE = """# HELP tensorcache_fetched_total blocks
tensorcache_fetched_total{model="a"} 3
tensorcache_fetched_total{model="b"} 4
tensorcache_fetched_total_of_others 100
tensorcache_plain 1.5
other_fetched_total 9
"""


def answer(text: str = "the sea", *, cached: int = 0, ttft_s: float = 2.0) -> StreamedAnswer:
    return StreamedAnswer(text=text, input_tokens=1000, cached_tokens=cached, arrivals=[ttft_s])


COLD = answer()
WARM = answer(cached=960, ttft_s=0.2)


def step(warm: StreamedAnswer = WARM, *, what: str = "restored", fetched: float = 0) -> Step:
    return Step(what, "node-2", warm, fetched, COLD)


FIRST = Step("computed", "node-1", COLD, 0)
KEPT = [FIRST, step(), step(what="without node-1", fetched=16), step(what="without node-1")]


def test_a_demo_that_held() -> None:
    judge(KEPT)
    assert step(fetched=16).row() == ("restored", "node-2", "1000", "960", "16", "200 ms", "yes")
    assert FIRST.row()[-1] == ""


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (step(answer("a lake", cached=960, ttft_s=0.2)), "the text differs: first 'the sea', then 'a lake'"),
        (step(answer(cached=0, ttft_s=0.2)), "nothing was restored"),
        (step(answer(cached=960, ttft_s=2.1)), "restored, and not sooner: 2.10 s after 2.00 s"),
        (step(answer("", cached=960, ttft_s=0.2)), "the answer is empty"),
        (Step("computed", "node-1", WARM, 0), "cached tokens 960, expected 0"),
    ],
)
def test_a_demo_that_did_not_hold(broken: Step, told: str) -> None:
    with pytest.raises(RejectedError) as refused:
        judge([*KEPT, broken])
    assert str(refused.value).endswith(told)
    assert "\n" not in str(refused.value)


def test_a_replica_must_have_been_asked() -> None:
    steps = [FIRST, step(), step(what="without node-1"), step(what="without node-1")]
    with pytest.raises(RejectedError, match="no block came from another node"):
        judge(steps)


def test_figures_are_sums_of_one_metric() -> None:
    assert figure_of(PAGE, "fetched_total") == 7
    assert figure_of(PAGE, "plain") == 1.5
    assert figure_of(PAGE, "nothing") is None
