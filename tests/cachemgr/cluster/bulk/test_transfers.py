"""Blocks travel whole, in the order asked, whatever their size and however they go."""

import pytest

from tests.cachemgr.cluster.bulk.pair import BIG, HUGE, addresses, fill, pair, run, whole
from tests.cachemgr.host import FORMAT, Host, chain

FORMATS = pytest.mark.parametrize("block_format", [FORMAT, BIG, HUGE], ids=["tiny", "half MiB", "5 MiB"])
WAYS = pytest.mark.parametrize("same_host", [False, True], ids=["socket", "arena"])


@FORMATS
@WAYS
def test_blocks_arrive_whole(host: Host, block_format, same_host) -> None:
    async def test() -> None:
        async with pair(host, block_format=block_format, blocks=12, same_host=same_host) as p:
            names = chain(p.owner.cache, 8)
            fill(p.owner, names, block_format)
            fetched = await p.get(addresses(names))
            assert fetched.arrived == (True,) * 8
            assert fetched.nbytes == 8 * (128 + block_format.payload_nbytes)
            assert whole(p.reader.store, names, block_format) == 8
            assert p.client.in_place is same_host

    run(test)
