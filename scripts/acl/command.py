"""The verbs of `tensorcache acl` and their options."""

from scripts.acl.redis import add_redis
from scripts.arguments import Verbs, add_verb

EXAMPLES = """
  tensorcache acl redis --cluster prod > users.acl       # then: redis-server --aclfile users.acl
"""


def add_parser(verbs: Verbs) -> None:
    """Add this verb to the command line."""
    acl = add_verb(verbs, "acl", summary="say who may do what", examples=EXAMPLES)
    parts = acl.add_subparsers(dest="part", required=True, metavar="PART")
    add_redis(parts)
