"""Fixtures of the cache manager's tests."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from cachemgr import PrefixCache
from tests.cachemgr.host import Host
from tests.cachemgr.open_tiers import TIERS, OpenTier
from tests.cachemgr.peer_process import Peer

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


@pytest.fixture
def start_peer(host: Host) -> Iterator[Callable[..., Peer]]:
    peers: list[Peer] = []

    def start(**options: int) -> Peer:
        peers.append(Peer(host, **options))
        return peers[-1]

    yield start
    for peer in peers:
        peer.kill()  # one that a failed test left churning would not end by itself


@pytest.fixture(params=TIERS)
def open_tier(request: pytest.FixtureRequest, host: Host) -> OpenTier:
    """`open_tier(blocks=64)`: a cache with room for so many blocks."""
    opened: OpenTier = request.param(host)
    return opened


@pytest.fixture
def cache(open_tier: OpenTier) -> PrefixCache:
    return open_tier()
