"""The embedded cache manager: block hashes, shards, arenas, tiers, leases.

Never imports engines or backend.
"""

from cachemgr.cache import HostCache, open_cache
from cachemgr.contract import BlockFormat, BlockHash, Lease, PendingBlock, PrefixCache, RemoteTier, Sink
from cachemgr.errors import CacheError, SecretsError, SettingsError
from cachemgr.lane_tier import LaneTier
from cachemgr.remote import NoRemoteTier
from cachemgr.secrets import CacheSecrets
from cachemgr.settings import CacheSettings

__all__ = [
    "BlockFormat",
    "BlockHash",
    "CacheError",
    "CacheSecrets",
    "CacheSettings",
    "HostCache",
    "LaneTier",
    "Lease",
    "NoRemoteTier",
    "PendingBlock",
    "PrefixCache",
    "RemoteTier",
    "SecretsError",
    "SettingsError",
    "Sink",
    "open_cache",
]
