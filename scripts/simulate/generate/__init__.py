"""Traffic made up from a seed, for those who have no trace yet: the same seed gives the same bytes.

    draws       random numbers, by arithmetic that no release of Python changes
    prompt      a prompt that grows by whole turns, as ids of its blocks
    sessions    sessions that begin at random times and run side by side, as one stream of requests
    zipf        prompts about shared documents, few of them popular
    chat        conversations: a system prompt, turns, time to think, every turn begins with all before
    agent       agents: long shared tool descriptions, many short steps, branches that come back

Times, lengths and shares are of the order that public traces show; none is fitted to one.
"""

from collections.abc import Callable, Iterator

from scripts.simulate.generate.agent import agent
from scripts.simulate.generate.chat import chat
from scripts.simulate.generate.draws import Draws
from scripts.simulate.generate.sessions import take
from scripts.simulate.generate.zipf import zipf
from scripts.simulate.trace_file import Request

__all__ = ["KINDS", "generate"]

_SOURCES: dict[str, Callable[[Draws], Iterator[Request]]] = {"zipf": zipf, "chat": chat, "agent": agent}
KINDS = tuple(_SOURCES)


def generate(kind: str, *, seed: int, requests: int) -> Iterator[Request]:
    """So many requests of that kind, in the order of their times."""
    return take(_SOURCES[kind](Draws(seed)), requests)
