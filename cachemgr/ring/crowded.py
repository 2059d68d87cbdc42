"""Warns where one failure domain holds so much that its loss would hurt more than replicas can help."""

from collections import Counter

from cachemgr.ring.state import RingState, home_of


def crowded_domain(state: RingState) -> str:
    """One line if one of three failure domains or more has over a third of the vnodes; else empty."""
    nodes = {node.id: node for node in state.nodes if not node.draining}
    held: Counter[str] = Counter()
    for node in nodes.values():
        held[node.failure_domain] += node.vnodes
    for vnode, target in state.overrides.items():
        home = home_of(vnode)
        if home in nodes and target in nodes:
            held[nodes[home].failure_domain] -= 1
            held[nodes[target].failure_domain] += 1
    domain, most = max(held.items(), key=lambda item: (item[1], item[0]))
    total = held.total()
    if len(held) < 3 or 3 * most <= total:
        return ""
    return (
        f"failure domain {domain} holds {most / total:.0%} of the ring ({most} of {total} vnodes of "
        f"{len(held)} domains): give its nodes less weight, or add nodes elsewhere"
    )
