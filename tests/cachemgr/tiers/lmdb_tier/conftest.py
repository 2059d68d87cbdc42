"""Fixtures of the LMDB tier: a folder on a real disk."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where a tier keeps its blocks; not there yet."""
    parent = Path(tempfile.mkdtemp(prefix="tensorcache-lmdb-"))
    yield parent / "tier"
    shutil.rmtree(parent, ignore_errors=True)
