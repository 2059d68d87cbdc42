"""A redis-server of one's own for each test that asks for it."""

from tests.redis_server import redis_server  # noqa: F401  # fixture
