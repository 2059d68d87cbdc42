"""The tiers that every behaviour test runs on; a new one is added here and nowhere else."""

from collections.abc import Callable

import pytest

from cachemgr import PrefixCache
from tests.cachemgr.host import Host

OpenTier = Callable[..., PrefixCache]


def open_host_tier(host: Host) -> OpenTier:
    return host.open


TIERS = [pytest.param(open_host_tier, id="host")]
