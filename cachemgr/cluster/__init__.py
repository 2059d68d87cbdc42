"""Nodes that share their caches: what one computed, any restores.

    contract       what the parts promise each other;  `settings` how a node takes part
    node           one node of the cluster, and its lock (`node_lock`)
    certificates   who a node is, proven; new files take over without a restart
    outward        what every process of a node has: the way to the others
    listening      what the one that is the node has beside: it answers, and keeps blocks where they belong
    rings          the ring in force, and those before it;  `members` where rings come from
    fetch          the read side;  `moves` the write side
    control, bulk  what travels: calls, and the bytes of blocks
    background     work that goes on beside requests

Threads: one IO thread with one asyncio loop owns all of this; `HostStore` is shared with the step loop.
"""
