"""What a user of Redis needs to be allowed, one role at a time: everything else is refused.

Each role begins with nothing (`resetkeys resetchannels -@all`) and gets single commands on the keys of one
cluster. The lists are held to what is really sent by tests that run under these very rules.

A reader's GETEX renews a block's time to live, and could shorten it as well: Redis does not tell the two
apart. Who must not even do that cannot be a reader.
"""

import re
from dataclasses import dataclass

_CLUSTER = re.compile(r"[a-z0-9.-]{1,63}")


@dataclass(frozen=True, slots=True)
class Role:
    """What a user may do: `commands` on keys that begin with `keys`."""

    name: str
    keys: str
    commands: tuple[str, ...]
    cluster_commands: tuple[str, ...] = ()
    """Beside them, where it is a Redis Cluster."""


_READS = ("exists", "getex")
_SLOTS = ("cluster|slots",)

ROLES = {
    "reader": Role("reader", "{cluster}:kv:", _READS, _SLOTS),
    "writer": Role("writer", "{cluster}:kv:", (*_READS, "pexpire", "set", "unlink"), _SLOTS),
    "membership": Role(
        "membership",
        "tensorcache:{cluster}:",
        ("hget", "hset", "set", "sadd", "srem", "smembers", "mget", "del", "eval"),
    ),
}
"""By name: blocks read; blocks read, kept and removed; the ring and the nodes' signs of life."""


def is_cluster_id(text: str) -> bool:
    """Can a cluster be called that? In a key pattern nothing of it has a meaning."""
    return _CLUSTER.fullmatch(text) is not None


def rules(role: Role, *, cluster: str, cluster_mode: bool = False, database: int = 0) -> list[str]:
    """The words of an ACL rule, but for user and password."""
    commands = [*role.commands, *(role.cluster_commands if cluster_mode else ())]
    if database:
        commands.append("select")
    keys = role.keys.format(cluster=cluster)
    return ["resetkeys", f"~{keys}*", "resetchannels", "-@all", *(f"+{command}" for command in commands)]
