"""The verbs of `tensorcache acl` and their options."""

from scripts.acl.check import add_check
from scripts.acl.new_key import add_new_key
from scripts.acl.redis import add_redis
from scripts.arguments import Verbs, add_verb

EXAMPLES = """
  tensorcache acl new-key search --models smollm2        # prints a credential, once
  tensorcache acl check --key-file search.key            # whose it is, and what they may do
  tensorcache acl list                                   # principals, and how long their keys are valid
  tensorcache acl redis --cluster prod > users.acl       # then: redis-server --aclfile users.acl
"""


def add_parser(verbs: Verbs) -> None:
    """Add this verb to the command line."""
    acl = add_verb(verbs, "acl", summary="say who may do what", examples=EXAMPLES)
    parts = acl.add_subparsers(dest="part", required=True, metavar="PART")
    add_new_key(parts)
    add_check(parts)
    add_redis(parts)
