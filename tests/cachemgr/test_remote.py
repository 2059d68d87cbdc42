"""The null tier: always there, always empty."""

import asyncio

from cachemgr import BlockHash, NoRemoteTier, RemoteTier


def test_nothing_is_ever_there_and_nothing_is_taken() -> None:
    async def ask(tier: RemoteTier) -> tuple[list[bytes | None], int]:
        name = BlockHash(bytes(16))
        answer = (
            await tier.get([name, name], deadline=0.0),
            await tier.put([(name, memoryview(b""))], deadline=0.0),
        )
        await tier.close()
        return answer

    assert asyncio.run(ask(NoRemoteTier())) == ([None, None], 0)
