"""A cluster of three small nodes, and the command asked about it."""

import re
from collections.abc import Callable, Iterator
from itertools import takewhile
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

    def table(self) -> list[list[str]]:
        """Cells of the table of nodes, row by row, its head first."""
        start = next(at for at, line in enumerate(self.lines) if line.startswith("node  "))
        rows = list(takewhile(lambda line: line.startswith("node-"), self.lines[start + 1 :]))
        return [re.split(r"  +", line) for line in (self.lines[start], *rows)]


Ask = Callable[..., Said]


@pytest.fixture(scope="module")
def still_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RingCluster]:
    """For tests that change nothing: one for all of a module."""
    with ring_cluster(tmp_path_factory.mktemp("ring")) as made:
        yield made


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
