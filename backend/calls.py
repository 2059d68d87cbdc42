"""What a facade and the decoder it asks agree on beside the request: a call's name, its receipt, its end.

A call inside the server (BLS) cannot be cancelled, ends neither when its caller leaves nor when the process
that answers it dies, and holds one of the server's 32 threads for such calls until its first response. So

    facade ──request, CALL = id──────▶ decoder      id: 128 random bits, nobody can guess another's
    facade ◀──receipt (process id)──── decoder      at once: frees the server's thread; whom to watch
    facade ──CANCEL_CALL = id────────▶ decoder      if the client left
    facade ◀──the answer, or an error written as one─── decoder

An error goes as data because the server passes it on without its status, and never ends the call if it
follows another response. A receipt has TEXT alone; the answer has a REASON, which of an error begins with
ERROR.

A client can write these parameters too. It gains nothing: one response more, errors written as data, and the
end of calls whose ids it chose itself. A facade forwards no name of this kind.

Threads: `Calls` from any.
"""

import os
import re
import secrets
import select
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from weakref import WeakValueDictionary

CALL: Final = "triton_call"
CANCEL_CALL: Final = "triton_cancel_call"
INTERNAL_PREFIX: Final = "triton_"

TEXT: Final = "text_output"
REASON: Final = "finish_reason"
ERROR: Final = "error "
"""With a status behind it: the reason of an answer that is an error; TEXT says what is wrong."""

_ID: Final = re.compile(r"[0-9a-f]{32}")


def new_call_id() -> str:
    """A name that nobody else has or can guess."""
    return secrets.token_hex(16)


@dataclass(slots=True, weakref_slot=True, eq=False)
class Call:
    """One call of a facade, at the decoder. Whoever answers it holds it and looks at `cancelled`."""

    cancelled: bool = False


class Calls:
    """The decoder's open calls by id. A call is forgotten with the last who holds it."""

    def __init__(self) -> None:
        self._open: WeakValueDictionary[str, Call] = WeakValueDictionary()

    def opened(self, parameters: Mapping[str, object]) -> Call | None:
        """The call that these parameters belong to, remembered; None if no facade asks."""
        call_id = parameters.get(CALL)
        if not isinstance(call_id, str) or not _ID.fullmatch(call_id):
            return None
        call = Call()
        self._open[call_id] = call
        return call

    def cancel(self, call_id: object) -> None:
        """End a call; no effect when it has ended."""
        call = self._open.get(call_id) if isinstance(call_id, str) else None
        if call is not None:
            call.cancelled = True


class Process:
    """Another process of this machine, by a descriptor that tells when it ends, though it be a zombie."""

    def __init__(self, pid: int) -> None:
        """Raises OSError where there is no such process, or no such descriptor."""
        self._descriptor = os.pidfd_open(pid)
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)

    @property
    def ended(self) -> bool:
        """True once it has exited or was killed."""
        return bool(self._poll.poll(0))

    def close(self) -> None:
        """Look no more."""
        os.close(self._descriptor)
