"""`tensorcache acl`: who may do what, in the words of those who enforce it.

command        the verbs and their options
new_key        `tensorcache acl new-key`: a credential, shown once (acl_edit, acl_text: what the file gets)
check          `tensorcache acl check` and `list`: what a file says (found), and whose a credential is
where          which file that is, and where a credential comes from
redis          `tensorcache acl redis`: users of a Redis, or a configuration for one
redis_rules    what a reader, a writer and a node's membership need there, and nothing else
redis_conf     a redis.conf to begin with
passwords      where passwords come from, and how they are shown
"""

from scripts.acl.command import add_parser

__all__ = ["add_parser"]
