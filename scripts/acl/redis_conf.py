"""A redis.conf to begin with: settings that exist, each with its reason."""

BLOCKS = """\
# A Redis (7 or newer) or Valkey that keeps blocks for TensorCache. What it holds can be computed again.
bind 127.0.0.1 -::1
protected-mode yes
port 6379
# Off loopback, TLS only: blocks reveal prompts. rediss:// in [redis] url, then.
# port 0
# tls-port 6379
# tls-cert-file /etc/redis/redis.crt
# tls-key-file /etc/redis/redis.key
# tls-ca-cert-file /etc/redis/ca.crt
# tls-auth-clients optional

# Users: tensorcache acl redis --cluster CLUSTER > /etc/redis/users.acl
# aclfile /etc/redis/users.acl

# When it is full, what was used least recently goes, before its time to live is over.
maxmemory {maxmemory}
maxmemory-policy {policy}
maxmemory-samples 10
# Values of a MiB each: give memory back while nobody waits for it.
lazyfree-lazy-eviction yes
lazyfree-lazy-expire yes
lazyfree-lazy-user-del yes
lazyfree-lazy-server-del yes

# Nothing is written to a disk: it would copy gigabytes, and a restart begins empty without harm.
save ""
appendonly no

tcp-backlog 511
tcp-keepalive 60
timeout 0
hz 10
"""

MEMBERSHIP = """\
# A Redis (7 or newer) or Valkey for the membership of a TensorCache cluster: a few KiB that must not be
# evicted. Not the one that keeps blocks: maxmemory-policy is one per server, not one per database.
bind 127.0.0.1 -::1
protected-mode yes
port 6379
# Off loopback, TLS only.
# port 0
# tls-port 6379
# tls-cert-file /etc/redis/redis.crt
# tls-key-file /etc/redis/redis.key
# tls-ca-cert-file /etc/redis/ca.crt
# tls-auth-clients optional

# Users: tensorcache acl redis --cluster CLUSTER --role membership > /etc/redis/users.acl
# aclfile /etc/redis/users.acl

maxmemory {maxmemory}
maxmemory-policy noeviction

# The ring survives a restart. If it is lost all the same, the nodes bring it back.
save ""
appendonly yes
appendfsync everysec

tcp-keepalive 60
timeout 0
"""


def conf_for_blocks(maxmemory: str = "4gb", *, policy: str = "allkeys-lru") -> str:
    """Of a server that keeps blocks."""
    return BLOCKS.format(maxmemory=maxmemory, policy=policy)


def conf_for_membership(maxmemory: str = "64mb") -> str:
    """Of a server that keeps the ring."""
    return MEMBERSHIP.format(maxmemory=maxmemory)
