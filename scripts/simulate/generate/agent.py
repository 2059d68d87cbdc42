"""Agents: long tool descriptions that many tasks share, then many short steps, a few seconds apart.

A task branches: it tries something from the point where it stands, several ways in turn, and what it gives
up never comes back, while what was before the branch does.
"""

from collections.abc import Iterator
from itertools import count

from scripts.simulate.generate.draws import Draws, Zipf
from scripts.simulate.generate.prompt import Prompt
from scripts.simulate.generate.sessions import Session, Step, side_by_side
from scripts.simulate.trace_file import Request

_AGENTS = 12
_LONGEST = 100_000
_BRANCHES = 0.12
_GIVES_UP = 0.1
_ENDS = 0.04


def agent(draws: Draws) -> Iterator[Request]:
    """One task begins every four seconds."""
    ids = count()
    popular = Zipf(draws, _AGENTS, exponent=1.0)
    tools = [Prompt(ids).grow(draws.tokens(12_000, 0.6, most=40_000)) for _ in range(_AGENTS)]
    return side_by_side(draws, lambda: _task(draws, tools[popular.rank()].fork()), every_s=4.0)


def _task(draws: Draws, prompt: Prompt) -> Session:
    branches = [prompt.grow(draws.tokens(800, 1.0, most=20_000))]
    after_s = 0.0
    while branches:
        at = draws.below(len(branches))
        tried = branches[at]
        tokens_out = draws.tokens(120, 0.8, most=2000)
        yield Step(after_s, tried.chain, tried.tokens, tokens_out)
        after_s = draws.lognormal(4.0, 1.0)
        if draws.chance(_ENDS):
            return
        if tried.tokens > _LONGEST or (len(branches) > 1 and draws.chance(_GIVES_UP)):
            del branches[at]
            continue
        if draws.chance(_BRANCHES):
            branches.append(tried.fork().grow(draws.tokens(200, 0.8, most=4000)))
        tried.grow(tokens_out).grow(draws.tokens(350, 1.1, most=16_000))  # with what its tool returned
