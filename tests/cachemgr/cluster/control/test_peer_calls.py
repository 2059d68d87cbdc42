"""Calls to one peer that end while we leave."""

import asyncio
import time

import pytest

from cachemgr.cluster.control.peer_calls import PeerCalls
from cachemgr.ring import NodeId


@pytest.mark.parametrize(("ends", "said"), [(True, []), (False, ["peer b: 1 calls are broken off"])])
def test_only_calls_that_run_still_are_said_to_be_broken_off(
    caplog: pytest.LogCaptureFixture, ends: bool, said: list[str]
) -> None:
    async def leave() -> None:
        calls = PeerCalls(NodeId("b"), open_s=1.0, fair_s=1.0, clock=time.monotonic)
        answered = asyncio.Event()
        running = asyncio.create_task(calls.run(answered.wait, miss=False, deadline=time.monotonic() + 60.0))
        await asyncio.sleep(0)
        if ends:
            asyncio.get_running_loop().call_soon(answered.set)
        await calls.finish(0.0)
        answered.set()
        assert await running

    asyncio.run(leave())
    assert caplog.messages == said
