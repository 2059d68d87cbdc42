"""Tasks that use a store: so that it can go away when the last of them ended.

Threads: the IO loop.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from cachemgr.host_contract import HostStore

T = TypeVar("T")

log = logging.getLogger(__name__)


class StoreTasks:
    """What is under way, by store. What a task raises is our own bug: logged, and counted in `failures`."""

    def __init__(self) -> None:
        self._stores: dict[asyncio.Task[Any], HostStore] = {}
        self.failures = 0

    def __len__(self) -> int:
        return len(self._stores)

    def begin(self, store: HostStore, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run `work` beside everything else."""
        task = asyncio.get_running_loop().create_task(work)
        self._stores[task] = store
        task.add_done_callback(self._ended)
        return task

    async def end(self, store: HostStore | None = None) -> None:
        """Nothing uses `store`, or any store, when this returns."""
        tasks = [task for task, used in self._stores.items() if store is None or used is store]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._stores.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failures += 1
            log.error("what is beyond this process: a call failed", exc_info=error)
