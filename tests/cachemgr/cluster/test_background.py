"""Work beside requests ends when it is told to, and hides from nobody that he is to end as well."""

import asyncio

from cachemgr.cluster.background import Background


def test_who_closes_it_can_be_cancelled() -> None:
    async def test() -> None:
        ended = asyncio.Event()

        async def look() -> float:
            try:
                await asyncio.sleep(3600)
            finally:
                await ended.wait()
            return 0.0

        background = Background("test", look)
        background.start()
        await asyncio.sleep(0)
        closing = asyncio.create_task(background.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait({closing}, timeout=5)
        ended.set()
        await asyncio.wait({closing})
        assert closing.cancelled()

    asyncio.run(test())
