"""An owner that is another process: read over both ways, paused, continued, killed."""

import signal
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from cachemgr.cluster.bulk.client import BulkClient
from cachemgr.cluster.bulk.frames import PeerTrouble
from tests.cachemgr.cluster.bulk.owner_process import OwnerProcess
from tests.cachemgr.cluster.bulk.pair import (
    BIG,
    OWNER,
    READER,
    FixedRings,
    addresses,
    after,
    assert_idle,
    run,
    settings,
    whole,
)  # fmt: skip
from tests.cachemgr.host import Host, chain
from tests.cachemgr.node import open_node

BLOCKS = 24


@pytest.fixture
def owner(host: Host) -> Iterator[OwnerProcess]:
    process = OwnerProcess(host, blocks=BLOCKS)
    yield process
    process.close()


@pytest.mark.parametrize("same_host", [False, True], ids=["socket", "arena"])
def test_an_owner_that_is_paused_costs_its_deadline_and_serves_when_it_goes_on(
    host: Host, owner: OwnerProcess, same_host: bool
) -> None:
    async def test() -> None:
        reader = open_node(host, "reader", block_format=BIG, blocks=BLOCKS)
        client = BulkClient(
            OWNER, me=READER, open_channel=lambda: owner.door(same_host=same_host), rings=FixedRings(READER),
            settings=settings(lookup_s=0.2, same_host=same_host),
        )  # fmt: skip
        blocks = addresses(chain(reader.cache, BLOCKS))
        names = [block.hash for block in blocks]

        async def get(seconds: float = 20.0) -> int:
            for _ in range(50):  # a busy machine may pause it as well
                with suppress(PeerTrouble):
                    return sum((await client.get(reader.store, blocks, deadline=after(seconds))).arrived)
            raise AssertionError("never")

        assert await get() == BLOCKS
        assert client.in_place is same_host
        reader.store.drop(names)

        owner.signal(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(PeerTrouble) as caught:
            await client.get(reader.store, blocks, deadline=after(1.0))
        assert caught.value.kind == "silent"
        assert time.monotonic() - began < 5
        assert_idle(reader)
        assert whole(reader.store, names, BIG) == 0

        owner.signal(signal.SIGCONT)
        assert await get() == BLOCKS
        reader.store.drop(names)
        owner.signal(signal.SIGKILL)
        with pytest.raises(PeerTrouble):
            await client.get(reader.store, blocks, deadline=after(1.0))
        assert_idle(reader)
        await client.close()

    run(test)
