"""`tensorcache simulate`: which eviction policy would have kept what your traffic asked for again.

    command     the verb and its options
    trace       requests as chains of blocks, in columns;  `trace_file` Mooncake's format of them
    generate    traffic made up from a seed: zipf, chat, agent
    contract    what a cache and a policy are to a replay
    prefix_cache  a cache of prefixes under any policy that knows single blocks
    policies    one policy a file: the textbook's, the offline optimum, and the product's own
    replay      a trace through a cache: hits, and what a block costs
    report      JSON lines, tables and plots of what was measured

A block is a hit if it and all before it are there: what a prompt can use of a cache is its longest resident
prefix. `ours` is the code that runs in the product (`cachemgr.eviction`), not a copy of it.
"""

from scripts.simulate.command import add_parser

__all__ = ["add_parser"]
