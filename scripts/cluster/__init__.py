"""Several servers on this machine whose cache nodes are one cluster: `tensorcache cluster up` and `demo`.

    command     the verbs and their options
    plan        how many nodes, where they listen, what they serve
    homes       a serving home per node, all of one signed release and the same secrets
    node        one `tensorcache serve`: started, watched, killed outright, stopped without a trace
    running     all of them together, however it ends
    figures     what a node tells about itself on its metrics page
    demo        what one server computed, the others restore, also after it was killed

Nodes find each other on the loopback interface; arenas in /dev/shm stay when a cluster stops.
"""

from scripts.cluster.command import add_parser

__all__ = ["add_parser"]
