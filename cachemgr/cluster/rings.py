"""The ring in force on this node, and the ones before it that readers still ask.

A higher version replaces a lower one, wherever it comes from. The ring that was replaced is `previous` for
`previous_s` after the change, and for as long as this node has not pulled all that the new one gave it.
Changes that follow each other quicker than blocks can move leave several of those: `earlier` has them all.

Invariants
- The version only ever rises, over restarts as well as the disk allows.
- What listeners hear of is on disk; where the disk refuses, the node goes on with what it has in memory, and
  says so.
- A ring that was replaced within `SETTLED_S` placed next to nothing (it lost to another change made at the
  same time): the one before it stays `previous`.

Threads: the IO thread only. Installing writes and syncs one small file there.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from cachemgr.cluster.contract import RingListener
from cachemgr.ring import (
    MAX_EARLIER,
    Epoch,
    KeptRings,
    NodeId,
    ReplacedRing,
    Ring,
    RingConflict,
    RingError,
    RingFile,
    RingState,
    Version,
    encode_ring,
)

SETTLED_S = 2.0

NO_RING = Version(Epoch(0), bytes(16))
"""Below the version of every ring: that of a node which knows none yet."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Replaced:
    ring: Ring
    at: float
    """time.time() of its replacement."""


class RingsInForce:
    """Implements `Rings`. `now`: time.time(), as it has to mean something after a restart."""

    def __init__(
        self,
        node: NodeId,
        *,
        file: RingFile,
        previous_s: float,
        given: RingState | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Starts with the higher of what `file` has and what is `given`; without either there is no ring."""
        self._node = node
        self._file = file
        self._previous_s = previous_s
        self._now = now
        self._listeners: list[RingListener] = []
        self._ring: Ring | None = None
        self._earlier: list[_Replaced] = []
        self._changed_at = 0.0
        self._pulled = True
        self._encoded = b""
        self._trouble = ""
        self._load()
        if given is not None:
            self.install(given)

    @property
    def node(self) -> NodeId:
        """Id of this node."""
        return self._node

    @property
    def known(self) -> bool:
        """True once there is a ring."""
        return self._ring is not None

    @property
    def ring(self) -> Ring:
        """The ring in force. RuntimeError before there is one."""
        if self._ring is None:
            raise RuntimeError("no ring is installed yet: membership starts before all that asks the ring")
        return self._ring

    @property
    def version(self) -> Version:
        """Of the ring in force; NO_RING before there is one."""
        return self._ring.version if self._ring is not None else NO_RING

    @property
    def encoded(self) -> bytes:
        """The ring in force as it is sent; empty before there is one."""
        return self._encoded

    @property
    def previous(self) -> Ring | None:
        """The one before, while readers should still ask its owners; else None."""
        earlier = self.earlier
        return earlier[0] if earlier else None

    @property
    def earlier(self) -> tuple[Ring, ...]:
        """Every ring before whose owners may still have what was not moved, the latest first."""
        self._forget_old()
        return tuple(replaced.ring for replaced in self._earlier)

    @property
    def pulled(self) -> bool:
        """True if this node has all that the ring in force gave it."""
        return self._pulled

    @property
    def trouble(self) -> str:
        """Empty, or one line: why the ring in force would not survive a restart."""
        return self._trouble

    def install(self, state: RingState) -> bool:
        """Take a ring if its version is higher than ours: persist, tell listeners. False if it is not."""
        if state.epoch < self.version.epoch or state.version <= self.version:
            return False
        ring, before, now = Ring(state), self._ring, self._now()
        if before is not None:
            self._replace(before, now)
        self._ring, self._encoded = ring, encode_ring(state)
        self._changed_at = now
        self._pulled = False
        self._save()
        _log.info("ring %d is in force: %d nodes, %d replicas", state.epoch, len(state.nodes), state.replicas)
        for listener in self._listeners:
            self._tell(listener, ring)
        return True

    def propose(self, state: RingState, *, replaces: Version) -> None:
        """Install a change of `replaces`; RingConflict if that is not in force, RingError if not above it."""
        if replaces != self.version:
            raise RingConflict(self.version)
        if not self.install(state):
            raise RingError("epoch", f"must be above that in force, {self.version.epoch}", state.epoch)

    def mark_pulled(self, version: Version) -> None:
        """All that the ring of `version` gave this node is here; no news if another is in force by now."""
        if version == self.version and not self._pulled:
            self._pulled = True
            self._forget_old()
            self._save()

    def reread(self) -> None:
        """Another process of this node writes the file: take what it knows and we do not."""
        kept = self._file.load()
        if kept is None:
            return
        self.install(kept.current)
        if kept.pulled:
            self.mark_pulled(kept.current.version)

    def save_again(self) -> None:
        """If the disk refused the ring in force, try once more; what refuses it is logged once."""
        if self._trouble:
            self._save()
            if not self._trouble:
                _log.info("ring %d is on disk now", self.version.epoch)

    def listen(self, listener: RingListener) -> None:
        """Call `listener` after every installation."""
        self._listeners.append(listener)

    def _replace(self, before: Ring, now: float) -> None:
        self._forget_old()
        settled = now - self._changed_at >= SETTLED_S or not self._earlier
        if settled:
            self._earlier.insert(0, _Replaced(before, now))
            del self._earlier[MAX_EARLIER:]

    def _forget_old(self) -> None:
        """An unfinished pull keeps them all: what is missing may be with the owners of any of them."""
        if self._pulled and self._earlier:
            limit = self._now() - self._previous_s
            self._earlier = [replaced for replaced in self._earlier if replaced.at > limit]

    def _load(self) -> None:
        kept = self._file.load()
        if kept is None:
            return
        self._ring, self._encoded = Ring(kept.current), encode_ring(kept.current)
        self._pulled = kept.pulled
        # a clock that was set back must not keep `previous` for ever
        self._changed_at = min(kept.changed_at, self._now())
        self._earlier = [
            _Replaced(Ring(before.state), min(before.at, self._now())) for before in kept.earlier
        ]
        _log.info("ring %d, kept from before, is in force", kept.current.epoch)

    def _save(self) -> None:
        assert self._ring is not None
        earlier = tuple(ReplacedRing(before.ring.state, before.at) for before in self._earlier)
        kept = KeptRings(self._ring.state, earlier, self._changed_at, self._pulled)
        try:
            self._file.save(kept)
        except RingError as error:
            before = self._trouble
            self._trouble = f"ring {self._ring.state.epoch} would not survive a restart: {error}"
            if self._trouble != before:
                _log.error("ring %d is in force, but %s", self._ring.state.epoch, error)
        else:
            self._trouble = ""

    def _tell(self, listener: RingListener, ring: Ring) -> None:
        """A listener that fails is our bug, and no reason to keep the ring from the others."""
        try:
            listener(ring, self.previous)
        except Exception:
            _log.exception("ring %d: a listener failed", ring.state.epoch)
