"""Caches for the tier that runs under the rules."""

from tests.cachemgr.conftest import host, shared_memory  # noqa: F401  # fixtures
from tests.redis_server import redis_server  # noqa: F401  # fixture
