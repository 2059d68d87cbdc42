"""`tensorcache bench`: measures this machine's numbers against their goals and against peers, in one run.

`goals` is the table of rows, `harness` alternates sides and takes medians, `report` writes table and JSON,
`peers` runs other engines in processes of their own; one file of measurements per room of the product.
Nothing heavy is imported here: a peer's Python, which has none of our packages, passes through.
"""

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; the exit code is 0 however the goals came out, 2 for wrong arguments."""
    from scripts.bench.command import main as run

    return run(argv)


__all__ = ["main"]
