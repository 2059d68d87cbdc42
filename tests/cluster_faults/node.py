"""A cache node without an engine: a process that commits and reads chains as it is told, one JSON line each.

    python -m tests.cluster_faults.node '{"cluster": …, "node": …, …}'

    {"do": "commit", "chain": [format, seed, blocks]}      {"committed": [0, 1, …]}
    {"do": "read", "chain": […], "deadline_s": 1.0}        {"restored": 7, "wrong": [], "took_s": 0.01}
    {"do": "held", "chains": [[…], …]}                     {"held": [[0, 1, …], …]}
    {"do": "counters"}                                     {"counters": {…}}

Every answer repeats the `id` of its command, and tells which blocks a second failure domain acknowledged
since the one before: `twice`, a list of [format, seed, blocks, index]. The process ends with its standard
input, or with its parent.
"""

import contextlib
import json
import logging
import queue
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from cachemgr import BlockHash, CacheSettings, HostCache, open_cache
from cachemgr.cluster.settings import ClusterSettings
from cachemgr.host_contract import HostStore
from cachemgr.joining import open_beyond
from cachemgr.shard import slot_nbytes
from tests.cachemgr.host import SECRETS
from tests.cachemgr.writer_process import die_with_parent
from tests.cluster_faults.blocks import FORMATS, ChainId

_LOOK_S = 0.001


class NodeOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What a node is started with. `blocks`: room for so many of each format."""

    cluster: str
    node: str
    directory: str
    blocks: int
    settings: ClusterSettings


class FaultNode:
    """The caches of one node, one per format, and its place in the cluster."""

    def __init__(self, options: NodeOptions) -> None:
        self._stores: list[HostStore] = []
        self._written: dict[BlockHash, tuple[ChainId, int]] = {}
        self._twice: queue.SimpleQueue[BlockHash] = queue.SimpleQueue()
        self._cluster = open_beyond(
            CacheSettings(cluster=options.cluster, node=options.node, directory=options.directory),
            options.settings,
            copies=self._copied,
        )
        self._caches = [self._open(options, number) for number in range(len(FORMATS))]
        self._answers: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "commit": self._commit,
            "read": self._read,
            "held": self._held,
            "counters": self._counters,
        }

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Do what a command says."""
        return {"id": command["id"], **self._answers[command["do"]](command), "twice": self._take_twice()}

    def close(self) -> None:
        for cache in self._caches:
            cache.close()
        self._cluster.close()

    def _open(self, options: NodeOptions, number: int) -> HostCache:
        sizes = [options.blocks * slot_nbytes(one.payload_nbytes) for one in FORMATS]
        settings = CacheSettings(
            cluster=options.cluster, node=options.node, directory=options.directory,
            host_bytes=sum(sizes), arena_bytes=sizes[number],
        )  # fmt: skip
        return open_cache(FORMATS[number], settings, SECRETS, remote=self._tiers)

    def _tiers(self, store: HostStore) -> Any:
        self._stores.append(store)
        return self._cluster.tiers(store)

    def _copied(self, name: BlockHash, domains: frozenset[str]) -> None:
        """On the IO thread."""
        if len(domains) == 2:
            self._twice.put(name)

    def _take_twice(self) -> list[list[int]]:
        taken = []
        with contextlib.suppress(queue.Empty):
            while True:
                chain, index = self._written[self._twice.get_nowait()]
                taken.append([chain.format, chain.seed, chain.blocks, index])
        return taken

    def _commit(self, command: dict[str, Any]) -> dict[str, Any]:
        chain = ChainId(*command["chain"])
        cache = self._caches[chain.format]
        names = chain.names(cache)
        self._written.update({name: (chain, index) for index, name in enumerate(names)})
        committed = []
        for index, name in enumerate(names):
            pending = cache.prepare(names, index)
            if pending is not None:
                pending.payload[:] = chain.payload(name)
                cache.commit(pending)
                committed.append(index)
        return {"committed": committed}

    def _read(self, command: dict[str, Any]) -> dict[str, Any]:
        chain, started = ChainId(*command["chain"]), time.monotonic()
        cache = self._caches[chain.format]
        names = chain.names(cache)
        wrong: list[int] = []

        def sink(blocks: range, payloads: Sequence[npt.NDArray[np.uint8]]) -> None:
            for block, payload in zip(blocks, payloads, strict=True):
                if not np.array_equal(payload, chain.payload(names[block])):
                    wrong.append(block)

        lease = cache.acquire(names, deadline=started + command["deadline_s"])
        while not lease.ready:  # as the step loop does: it looks, and never waits
            time.sleep(_LOOK_S)
        took_s = time.monotonic() - started
        restored = cache.restore(lease, first=0, sink=sink)
        lease.release()
        return {"restored": restored, "wrong": wrong, "took_s": took_s}

    def _held(self, command: dict[str, Any]) -> dict[str, Any]:
        held = []
        for chain in (ChainId(*words) for words in command["chains"]):
            store = self._stores[chain.format]
            shards = store.hold(chain.names(self._caches[chain.format]))
            held.append([index for index, shard in enumerate(shards) if shard is not None])
            store.let_go([shard for shard in shards if shard is not None])
        return {"held": held}

    def _counters(self, command: dict[str, Any]) -> dict[str, Any]:
        counters = {name: value for of in self._cluster.counters().values() for name, value in of.items()}
        for cache in self._caches:
            for name, value in cache.counters().items():
                counters[name] = counters.get(name, 0.0) + value
        return {"counters": counters}


def main(text: str) -> None:
    die_with_parent()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    node = FaultNode(msgspec.json.decode(text, type=NodeOptions))
    print(json.dumps({"id": 0, "twice": []}), flush=True)
    for line in sys.stdin:
        print(json.dumps(node.answer(json.loads(line))), flush=True)
    node.close()


if __name__ == "__main__":
    main(sys.argv[1])
