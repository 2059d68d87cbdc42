"""Conversations: a system prompt that some share, then turns, each beginning with all before.

People think for a minute at the median, some for much longer, and after every turn one in three leaves.
"""

from collections.abc import Iterator
from itertools import count

from scripts.simulate.generate.draws import Draws, Zipf
from scripts.simulate.generate.prompt import Prompt
from scripts.simulate.generate.sessions import Session, Step, side_by_side
from scripts.simulate.trace_file import Request

_SYSTEM_PROMPTS = 20
_LONGEST = 120_000
_LEAVES = 1 / 3


def chat(draws: Draws) -> Iterator[Request]:
    """One conversation begins every second."""
    ids = count()
    popular = Zipf(draws, _SYSTEM_PROMPTS, exponent=1.0)
    system = [Prompt(ids).grow(draws.tokens(900, 0.9, most=8000)) for _ in range(_SYSTEM_PROMPTS)]
    return side_by_side(draws, lambda: _conversation(draws, system[popular.rank()].fork()), every_s=1.0)


def _conversation(draws: Draws, prompt: Prompt) -> Session:
    prompt.grow(draws.tokens(3000, 1.2, most=60_000))  # what it is about: a text, a file, or just a question
    after_s = 0.0
    while True:
        tokens_out = draws.tokens(350, 0.7, most=4000)
        yield Step(after_s, prompt.chain, prompt.tokens, tokens_out)
        if prompt.tokens > _LONGEST or draws.chance(_LEAVES):
            return
        prompt.grow(tokens_out)
        prompt.grow(draws.tokens(150, 1.2, most=20_000))
        after_s = draws.lognormal(60.0, 1.1)
