"""The LMDB tier: blocks on a disk of this node, within a bound, evicted by the product's policy.

    settings    section [lmdb]: the folder, its bound, how the disk is told
    tier        the LowerTier; owns both threads
    ├ reader      `known` and `get` on the reader's thread: one copy from the map into the reserved slot
    ├ writer      the queue, and the writer's thread: when a batch is due
    │ └ batch       one transaction: eviction, writing, growth of the map
    └ shelf       who writes here, opening, trouble, taking over from a process that ended
      ├ rows        what is kept, in memory, and the policy over it
      ├ folder      the lock of the writer; beginning anew
      └ database    LMDB; `map_gate`: nobody uses the map while it moves
    ending      how the loop waits for what a thread does;  `read_call` one call on its way
    record      how a block lies in the file;  `counts` its totals;  `errors` what stays inside

One environment holds the blocks of all formats: a name says which it is, one bound and one policy cover all,
and an engine that is rolled back finds what was not evicted meanwhile. Several processes of a node share the
folder: one writes, the others read, and take over when its lock falls free.

Imported only where `path` is set, but for the settings.
"""

from typing import TYPE_CHECKING

from cachemgr.tiers.lmdb_tier.settings import LmdbTierSettings

if TYPE_CHECKING:
    from cachemgr.tiers.contract import LowerTier

__all__ = ["LmdbTierSettings", "open_lmdb_tier"]


def open_lmdb_tier(settings: LmdbTierSettings) -> "LowerTier":
    """The tier, not started. LMDB is imported here."""
    from cachemgr.tiers.lmdb_tier.tier import LmdbTier

    return LmdbTier(settings)
