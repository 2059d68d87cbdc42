"""The embedded cache manager: what blocks are called, where their bytes are, and who may have them.

    contract        PrefixCache and what it takes and gives; the door for tiers beyond this process
    block_hash      tokens → names of blocks, a keyed chain
    cache           the two paths below, and the thread that looks after the arenas
    checked_copies  blocks out of arenas, handed over only once they passed their check
    host_tier       arenas and the table of their slots, replaced as a whole when an arena is lost
    slot_table      which slot may be found, pinned, evicted, reserved: all that the one lock guards
    ├ slot_state    what is behind that lock;  `single_blocks` the same for blocks without their chain
    ├ slot_shares   how namespaces share the slots;  `chain_room` a slot for the next block of a chain
    ├ index         name → slot, and a row per slot;  `name_map` the first of these, in small parts
    ├ eviction      which block goes next
    ├ other_blocks  name → slot in the arena of another process
    └ integrity     proof that these agree, for tests and idle checks
    lease           what callers hold: a lease to read, a reservation to write
    shard           a block's bytes with a header in front: sealing, and judging what is found
    arena           one shared-memory file of slots
    arena_files     which files are taken over, created, deleted, within one bound per node
    other_arenas    what other processes of this node publish in theirs
    lane_tier       lanes of finished sequences, for the next prompt with the same beginning
    joining         what is beyond this process, where anything is configured; else the null object
    host_contract   the host tier as all beyond see it;  `host_store` that over the table of slots
    tiers           the tiers below, and what of a prompt is brought from where
    ring            which node owns which segment;  `cluster` nodes that share their caches
    redis_client    alone speaks to Redis: membership, and the tier there;  `redis_address` where that is
    breaker         stops asking who does not answer
    remote, no_pins the null objects where no tier beyond this process, and no GPU, is configured
    secrets, keys   what names and tags are keyed with, and how keys are derived
    ├ secret_files  who may read a secret's file, and how one is written
    └ rotation      what opens and seals shards now, while files come and go
    settings        bounds and names of a node;  `errors` the refusals;  `counts` what the metrics show,
                    and `metric_texts` what that says

Read path: `hashes` → `lookup` counts the known run → `acquire` pins it → `restore` copies each block to
private memory, checks header and tag on the copy, hands it to the engine → `release`.
Write path: `prepare` reserves a slot, evicting if it must → the engine writes into it → `commit` seals the
header and writes its magic last.

Invariants
- Only a private copy that passed its check reaches the engine; anything else is a miss and a counter.
- A block is found whole or not at all: by threads, by other processes, and after a SIGKILL.
- A pinned slot is neither evicted nor written. Eviction takes descendants before their ancestors.
- The lock is held neither across I/O nor for longer than 100 µs.
- All arenas of a node together keep the bound; only the one that holds a file's lock writes it.

Never imports engines or backend.
"""

from cachemgr.cache import HostCache, open_cache
from cachemgr.cluster.settings import ClusterSettings
from cachemgr.contract import (
    BlockFormat,
    BlockHash,
    Lease,
    MemoryPins,
    NamespaceShare,
    PendingBlock,
    PrefixCache,
    RemoteTiers,
    Sink,
)
from cachemgr.errors import CacheError, SecretsError, SettingsError
from cachemgr.joining import Beyond, NothingBeyond, reach_beyond
from cachemgr.lane_tier import LaneTier
from cachemgr.metric_texts import metric_text
from cachemgr.remote import NoRemoteTiers
from cachemgr.rotation import TagKey, list_tag_keys, prune_tag_keys
from cachemgr.secrets import CacheSecrets, complete_secrets, probe_secret
from cachemgr.settings import CacheSettings
from cachemgr.tiers.lmdb_tier.settings import LmdbTierSettings
from cachemgr.tiers.redis_tier.settings import RedisTierSettings

__all__ = [
    "Beyond",
    "BlockFormat",
    "BlockHash",
    "CacheError",
    "CacheSecrets",
    "CacheSettings",
    "ClusterSettings",
    "HostCache",
    "LaneTier",
    "Lease",
    "LmdbTierSettings",
    "MemoryPins",
    "NamespaceShare",
    "NoRemoteTiers",
    "NothingBeyond",
    "PendingBlock",
    "PrefixCache",
    "RedisTierSettings",
    "RemoteTiers",
    "SecretsError",
    "SettingsError",
    "Sink",
    "TagKey",
    "complete_secrets",
    "list_tag_keys",
    "metric_text",
    "open_cache",
    "probe_secret",
    "prune_tag_keys",
    "reach_beyond",
]
