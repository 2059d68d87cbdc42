"""Prompts about shared documents: a document's text, then a question nobody else asks.

3,000 documents, popular as 1 / rank (Breslau et al., "Web caching and Zipf-like distributions", INFOCOM
1999).
"""

from collections.abc import Iterator
from itertools import count

from scripts.simulate.generate.draws import Draws, Zipf
from scripts.simulate.generate.prompt import Prompt
from scripts.simulate.generate.sessions import Session, Step, side_by_side
from scripts.simulate.trace_file import Request

_DOCUMENTS = 3000
_EXPONENT = 1.0


def zipf(draws: Draws) -> Iterator[Request]:
    """Three requests a second, each a session of its own."""
    ids = count()
    popular = Zipf(draws, _DOCUMENTS, exponent=_EXPONENT)
    documents: dict[int, Prompt] = {}

    def begin() -> Session:
        rank = popular.rank()
        if rank not in documents:
            documents[rank] = Prompt(ids).grow(draws.tokens(5000, 0.9, most=60_000))
        return _question(draws, documents[rank].fork())

    return side_by_side(draws, begin, every_s=1 / 3)


def _question(draws: Draws, prompt: Prompt) -> Session:
    prompt.grow(draws.tokens(400, 1.0, most=8000))
    yield Step(0.0, prompt.chain, prompt.tokens, draws.tokens(250, 0.8, most=4000))
