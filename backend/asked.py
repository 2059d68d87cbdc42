"""A request as it came, kept until its answer begins, so that it can be read again under another release."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from backend.access import NOBODY, Caller
from backend.generation import Generation
from backend.replies import ReplyStream, Sender

Inputs = Mapping[str, npt.NDArray[Any]]


@dataclass(slots=True, eq=False)
class Asked:
    """What a caller sent, and the way back. `received` is time.monotonic() seconds.

    `sender` makes the way back for what the request was read as; None: it could not be read, or not yet.
    `ticket` and `stream` are set once it waits or runs. `waited`: it was let into a queue before, so the
    queue's bound is not asked again. `probe`: it was read, and is a supervisor's. `entered` and
    `charged`: it counts to the caller's allowance.
    """

    request_id: str
    inputs: Inputs
    parameters: Mapping[str, object]
    sender: Callable[[Generation | None], Sender]
    received: float
    caller: Caller = NOBODY
    deadline: float | None = None
    ticket: int = 0
    stream: ReplyStream | None = None
    waited: bool = False
    probe: bool = False
    entered: bool = False
    charged: bool = False
