"""The embedded cache manager: block hashes, shards, arenas, tiers, leases. Never imports engines or backend."""

from cachemgr.contract import BlockFormat, BlockHash, Lease, PendingBlock, PrefixCache, RemoteTier, Sink

__all__ = ["BlockFormat", "BlockHash", "Lease", "PendingBlock", "PrefixCache", "RemoteTier", "Sink"]
