"""Everything that is said to Redis or Valkey, and the only room that imports redis-py and hiredis.

    client      RedisClient: small questions, for the cluster's membership
    line        RedisLine: one connection whose answers go where the caller wants them, for shards
    trouble     RedisTrouble: all that can go wrong, as one line without a password
    redis_py    redis-py and hiredis, as far as they are used

redis-py connects, proves who the server is and says who we are, in both. Its own readers and writers cost a
line of shards a third of its speed: values would lie in its buffers before they lie in the arena.

Threads: that of the asyncio loop that uses it.
"""

from cachemgr.redis_client.client import RedisClient
from cachemgr.redis_client.line import RedisLine, SmallAnswers
from cachemgr.redis_client.redis_py import key_slot
from cachemgr.redis_client.trouble import Kind, RedisTrouble

__all__ = ["Kind", "RedisClient", "RedisLine", "RedisTrouble", "SmallAnswers", "key_slot"]
