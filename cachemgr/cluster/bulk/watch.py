"""Watches that a request is answered in time, and finds who is to blame if it is not.

Not begun in time, or not ended by the deadline:
- nothing came on the whole connection meanwhile: the peer is silent, the connection is closed;
- other requests were served: this one gives up (busy), or keeps what has arrived, and the connection stays.

Threads: the IO thread.
"""

import asyncio

from cachemgr.cluster.bulk.client_calls import ClientCall
from cachemgr.cluster.bulk.client_channel import ClientChannel
from cachemgr.cluster.bulk.frames import PeerTrouble


class AnswerWatch:
    """One timer for one request, until `stop`."""

    __slots__ = ("_asked_at", "_begun_by", "_call", "_channel", "_deadline", "_loop", "_silence_s", "_timer")

    def __init__(
        self,
        channel: ClientChannel,
        call: ClientCall,
        *,
        begun_by: float,
        deadline: float,
        silence_s: float,
    ) -> None:
        """All times are loop seconds. `silence_s`: a connection on which nothing came for so long is
        silent.
        """
        self._channel = channel
        self._call = call
        self._begun_by = begun_by
        self._deadline = deadline
        self._silence_s = silence_s
        self._loop = asyncio.get_running_loop()
        self._asked_at = self._loop.time()
        self._timer = self._loop.call_at(begun_by, self._due)

    def stop(self) -> None:
        """The request has ended."""
        self._timer.cancel()

    def _due(self) -> None:
        if self._call.answered.done():
            return
        if not self._call.started:
            self._not_begun()
        elif self._loop.time() < self._deadline:
            self._timer = self._loop.call_at(self._deadline, self._due)
        else:
            self._not_ended()

    def _not_begun(self) -> None:
        if self._channel.last_heard > self._asked_at:
            self._call.answered.set_exception(PeerTrouble("busy", "others were served first"))
        else:
            self._channel.fail(PeerTrouble("silent", f"no answer within {self._elapsed():.3f} s"))

    def _not_ended(self) -> None:
        if self._loop.time() - self._channel.last_heard < self._silence_s:
            self._call.answered.set_result(self._channel.ended_early())
        else:
            self._channel.fail(PeerTrouble("silent", f"half an answer within {self._elapsed():.3f} s"))

    def _elapsed(self) -> float:
        return self._loop.time() - self._asked_at
