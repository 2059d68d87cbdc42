"""A cluster of three small nodes, and the command asked about it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from scripts.cli import main
from tests.scripts.ring.ring_cluster import RingCluster, ring_cluster


class Said(NamedTuple):
    """What a run of the command left."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    def table(self, first: str) -> list[list[str]]:
        """Cells of the table whose head begins with `first`, row by row."""
        start = next(at for at, line in enumerate(self.lines) if line.startswith(first + "  "))
        rows = [line.split() for line in self.lines[start : start + 1]]
        head = self.lines[start]
        for line in self.lines[start + 1 :]:
            if not line.startswith("node-") and first == "node":
                break
            rows.append([cell for cell in line.split("  ") if cell.strip()])
        assert head
        return [[cell.strip() for cell in row] for row in rows]


Ask = Callable[..., Said]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RingCluster]:
    with ring_cluster(tmp_path) as made:
        yield made


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """`ask("show", *cluster.at)`."""

    def run(*words: str) -> Said:
        capsys.readouterr()
        code = main(["ring", *words])
        out, err = capsys.readouterr()
        return Said(code, out, err)

    return run
