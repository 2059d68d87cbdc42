"""Blocks kept in Redis or Valkey, which outlive every node and are seen by all that use it.

    settings      RedisTierSettings: section [redis]
    tier          RedisTier: known, get, put, and what is looked after beside requests
    ├ places      which server has a segment: the one there is, or what a Redis Cluster says
    │ └ server    one server: its connections, its breaker
    ├ arriving    values into reserved slots, checked while hot
    └ writing     blocks that wait to be kept;  `offered` which were lately
      └ refusing  servers that answer and take nothing
    keys          what a block is called there
    counts        what it counts beside what every tier does

A value is the shard as it lies in an arena: 128 bytes of header, then the payload. It lives for `ttl_s` after
it was last read or offered.

Imports of Redis are late: a node without this section has none. Threads: the IO loop, no others.
"""

from collections.abc import Callable

from cachemgr.tiers.contract import LowerTier
from cachemgr.tiers.redis_tier.settings import RedisTierSettings

__all__ = ["RedisTierSettings", "open_redis_tier"]


def open_redis_tier(
    settings: RedisTierSettings, *, cluster: str, clock: Callable[[], float] | None = None
) -> LowerTier:
    """The tier of the nodes of `cluster`, to be started on the loop. SettingsError for a bad password file.

    `clock`: monotonic seconds of its breaker and its memory, for tests; deadlines are the loop's.
    """
    from cachemgr.tiers.redis_tier.tier import RedisTier

    return RedisTier(settings, cluster=cluster, **({} if clock is None else {"clock": clock}))
