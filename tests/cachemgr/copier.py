"""A second node for tests: brings missing blocks from another cache, one by one, on its own thread."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from cachemgr.contract import BlockHash
from cachemgr.host_contract import HeldShard, HostStore
from cachemgr.remote import NoRemoteTiers
from cachemgr.shard import ShardCheck, Verdict


def store_of(stores: list[HostStore]) -> Callable[[HostStore], NoRemoteTiers]:
    """For `open_cache(remote=…)`: puts the cache's store into `stores`, and never brings anything."""

    def keep(store: HostStore) -> NoRemoteTiers:
        stores.append(store)
        return NoRemoteTiers()

    return keep


def copy_shard(held: HeldShard, source: HostStore, target: HostStore) -> bool:
    """Copy, check, publish; False if nothing may go for it, it is there already, or it is not whole."""
    incoming = target.reserve(held.address)
    if incoming is None:
        return False
    incoming.payload[:] = held.payload
    check = target.check(held.header, held.address)
    if isinstance(check, ShardCheck):
        check.update(incoming.payload)
    if isinstance(check, Verdict) or not check.passed():
        target.abort(incoming)
        source.reject(held, check if isinstance(check, Verdict) else Verdict.CORRUPT)
        return False
    target.publish(incoming, held.header)
    return True


def copy_shards(source: HostStore, target: HostStore, names: Sequence[BlockHash]) -> int:
    """Copy blocks in order, until one is not there or has no room; how many were copied."""
    shards = source.hold(names)
    copied = 0
    for held in shards:
        if held is None or not (copy_shard(held, source, target) or not target.missing([held.address.hash])):
            break
        copied += 1
    source.let_go([held for held in shards if held is not None])
    return copied


class Copier:
    """RemoteTiers between the store of one cache and that of another."""

    active = True

    def __init__(self, near: HostStore, far: HostStore) -> None:
        self._near = near
        self._far = far
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="copier")
        self._fetches: list[Future[None]] = []
        self.given_up = 0
        self.offered: list[BlockHash] = []
        self.seen: list[BlockHash] = []

    def fetch(
        self,
        hashes: Sequence[BlockHash],
        *,
        deadline: float,
        done: Callable[[], None],
        block_s: float | None = None,
    ) -> Callable[[], None]:
        names = [hashes[index] for index in self._near.missing(hashes)]
        self._fetches.append(self._thread.submit(self._fetch, names, done))
        return self._give_up

    def offer(self, hashes: Sequence[BlockHash], index: int) -> None:
        self.offered.append(hashes[index])

    def used(self, hashes: Sequence[BlockHash]) -> None:
        self.seen.extend(hashes)

    def settle(self) -> None:
        """Wait until every fetch is done; what went wrong in one is raised here."""
        fetches = list(self._fetches)
        wait(fetches)
        for fetch in fetches:
            fetch.result()

    def close(self) -> None:
        self._thread.shutdown()

    def _fetch(self, names: Sequence[BlockHash], done: Callable[[], None]) -> None:
        try:
            copy_shards(self._far, self._near, names)
        finally:
            done()

    def _give_up(self) -> None:
        self.given_up += 1
