"""`tensorcache acl redis`: users of a Redis with as little as they need, or a redis.conf to begin with."""

import argparse
from pathlib import Path

from scripts.acl.passwords import hashed, make_password, password_in
from scripts.acl.redis_conf import conf_for_blocks, conf_for_membership
from scripts.acl.redis_rules import ROLES, is_cluster_id, rules
from scripts.arguments import Verbs, add_verb, path
from scripts.console import say
from scripts.errors import UsageError

EXAMPLES = """
  tensorcache acl redis --cluster prod                        # all three users, passwords in redis-passwords/
  tensorcache acl redis --cluster prod --role reader --password-file reader.password
  tensorcache acl redis --cluster prod --setuser              # as commands, for redis-cli
  tensorcache acl redis --conf blocks > redis.conf            # or: --conf membership

The lines belong into the file that `aclfile` of redis.conf names; they hold hashes, no passwords. A node then
says who it is in tensorcache.toml:

  [redis]
  url = "redis://tensorcache-writer@127.0.0.1:6379"
  password_file = "redis-passwords/tensorcache-writer"

A node that is told to be tensorcache-reader brings what is there, and keeps nothing. The last line refuses
`default`, which everybody is who names no user: with it on, the other lines would refuse nothing. Have a user
for administration, or say --keep-default where others need that one.
"""

_NAME = "tensorcache-{role}"


def add_redis(parts: Verbs) -> None:
    """Add this part to the command line."""
    parser = add_verb(
        parts, "redis", summary="users of a Redis, with as little as they need", examples=EXAMPLES
    )
    parser.add_argument("--cluster", metavar="ID", help="[node] cluster of the nodes that use it")
    parser.add_argument(
        "--role", choices=tuple(ROLES), action="append", help="only this one; may be repeated"
    )
    parser.add_argument(
        "--passwords", type=path, default=Path("redis-passwords"), metavar="DIR",
        help="one file per user; missing ones are made (default %(default)s)",
    )  # fmt: skip
    parser.add_argument("--password-file", type=path, metavar="FILE", help="of the one --role, instead")
    parser.add_argument("--cluster-mode", action="store_true", help="it is a Redis Cluster")
    parser.add_argument("--database", type=_database, default=0, metavar="N", help="default 0")
    parser.add_argument(
        "--setuser", action="store_true", help="ACL SETUSER commands instead of a file's lines"
    )
    parser.add_argument("--keep-default", action="store_true", help="leave the user `default` as it is")
    parser.add_argument("--conf", choices=("blocks", "membership"), help="print a redis.conf instead")
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Print it."""
    if arguments.conf:
        say((conf_for_blocks if arguments.conf == "blocks" else conf_for_membership)().rstrip("\n"))
        return 0
    cluster = arguments.cluster
    if cluster is None:
        raise UsageError("--cluster: name the cluster, as [node] cluster does")
    if not is_cluster_id(cluster):
        raise UsageError(f"--cluster: must be a-z, 0-9, '.' and '-', at most 63 of them, got {cluster!r}")
    names = list(dict.fromkeys(arguments.role or ROLES))
    if arguments.password_file and len(names) != 1:
        raise UsageError("--password-file: is one user's: say whose with --role")
    if arguments.cluster_mode and arguments.database:
        raise UsageError("--database: a Redis Cluster has no other than 0")
    start = "ACL SETUSER" if arguments.setuser else "user"
    for name in names:
        user = _NAME.format(role=name)
        if arguments.password_file:
            password = password_in(arguments.password_file)
        else:
            password = make_password(arguments.passwords / user)
        words = rules(
            ROLES[name], cluster=cluster, cluster_mode=arguments.cluster_mode, database=arguments.database
        )
        say(" ".join((start, user, "reset", "on", hashed(password), *words)))
    if not arguments.keep_default:  # last: it may be who says all this to the server
        say(f"{start} default reset off")
    return 0


def _database(text: str) -> int:
    if not text.isdecimal() or len(text) > 4:
        raise argparse.ArgumentTypeError(f"a database is a number from 0 to 9999, got {text!r}")
    return int(text)
