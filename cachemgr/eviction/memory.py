"""What becomes of blocks that are not here: ghosts by name, and what their return says of their class."""

from cachemgr.contract import BlockHash
from cachemgr.eviction.classes import MOST_SEEN, OF_COUNT
from cachemgr.eviction.ghosts import Ghost, Ghosts
from cachemgr.eviction.odds import Odds


class Memory:
    """Of first blocks of groups, for `capacity` slots; it also holds the odds of those that are here."""

    def __init__(self, capacity: int) -> None:
        self._ghosts = Ghosts(capacity)
        self._declined = 0
        self.odds = Odds()

    def come_back(self, name: BlockHash) -> tuple[int, int]:
        """How often a block that enters was seen, now included; how many of its group followed it."""
        ghost = self._ghosts.take(_mark(name))
        if ghost is None:
            return 1, 0
        self.odds.end(ghost.kind, ghost.epoch, returned=True)
        return min(ghost.seen + 1, MOST_SEEN), ghost.followers

    def keep(self, name: BlockHash, ghost: Ghost) -> None:
        """A block went."""
        lost = self._ghosts.put(_mark(name), ghost)
        if lost is not None:
            self.odds.end(lost.kind, lost.epoch, returned=False)

    def decline(self, name: BlockHash, kind: int, epoch: int) -> None:
        """A block was seen and does not enter; `kind` if it is for the first time."""
        count, _ = self.come_back(name)
        if count > 1:
            kind = OF_COUNT[count]
        self.odds.begin(kind, epoch)
        self._declined = _mark(name)
        self.keep(name, Ghost(epoch, kind, count, 0))

    def lengthen(self, *, most: int) -> None:
        """One more block of the group that was declined last."""
        self._ghosts.lengthen(self._declined, most=most)

    def count_of(self, name: BlockHash) -> int:
        """How often a block that is not here was seen; 0 if that is not known."""
        ghost = self._ghosts.find(_mark(name))
        return 0 if ghost is None else ghost.seen

    def gauges(self) -> dict[str, float]:
        """For the metrics page."""
        return {"cache_ghosts": float(self._ghosts.held), "cache_ghost_hits_total": float(self._ghosts.hits)}


def _mark(name: BlockHash) -> int:
    """A fingerprint; never 0."""
    return int.from_bytes(name[:4], "little") or 1
