"""Fixtures of the cache manager's tests."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.cachemgr.host import Host

settings.register_profile("no deadline", deadline=None)  # a busy machine is not a wrong answer
settings.load_profile("no deadline")


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    """A private directory on a real tmpfs, gone after the test."""
    directory = Path(tempfile.mkdtemp(prefix="tensorcache-test-", dir="/dev/shm"))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def host(shared_memory: Path) -> Iterator[Host]:
    host = Host(shared_memory)
    yield host
    host.close()
