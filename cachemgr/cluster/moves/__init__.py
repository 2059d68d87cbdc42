"""The write side: every block gets to its owners, and stays there when the ring or the nodes change.

    replicator     committed blocks to their owners;  `replication_lane` what one owner is still to be given
    mover          brings what the ring gives this node
    handover       gives away what it takes, and lets go of it then
    repair         makes up for nodes that are down, and for pushes that failed
    balance        moves a vnode away that takes most of its node's bandwidth
    giver          blocks to a peer that lacks them, at a pace;  `arcs` which part of the ring that is

Threads: the IO thread.
"""
