"""What a node tells about itself: sums over its metrics page."""

from scripts.triton_http import TritonHttp


def figure(server: TritonHttp, name: str) -> float | None:
    """The sum of all samples of `tensorcache_<name>`; None where there is no such metric, or no page now."""
    return figure_of(server.metrics(), name)


def figure_of(page: str, name: str) -> float | None:
    """The same, of a page in Prometheus' text form."""
    wanted = (f"tensorcache_{name} ", f"tensorcache_{name}{{")
    samples = [float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(wanted)]
    return sum(samples) if samples else None


def fetched_blocks(server: TritonHttp) -> float:
    """Blocks that a node got from others, since it started."""
    return figure(server, "cluster_fetched_blocks_total") or 0.0


def given_blocks(server: TritonHttp) -> float:
    """Copies that owners took from a node, since it started."""
    return figure(server, "cluster_replicated_blocks_total") or 0.0


def copies_waiting(server: TritonHttp) -> float | None:
    """Committed blocks that wait for their copies; None while the node does not say."""
    return figure(server, "cluster_replication_queue")
