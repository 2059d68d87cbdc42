"""`tensorcache ring`: what the ring of a running cluster looks like, and changes of it.

    command     the verbs;  `options` which cluster they are about
    asking      questions to control services, their troubles as one line
    show        the ring and its nodes;  `owners` of segments;  `explain` one block
    change      add, remove, move, drain, replicas: one ring in place of another
    views       what of a ring people read: shares, vnodes held, owners
    tables      aligned columns that stay whole in logs

All of it is asked of control services; nothing here opens what a node keeps.
"""

from scripts.ring.command import add_parser

__all__ = ["add_parser"]
