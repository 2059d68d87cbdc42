"""Random lives of a cache that a second node reads, fills and empties meanwhile, against a model of names.

Far has every block. Near has five slots, which leases, reservations and shards of both kinds compete for.
"""

import shutil
import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from cachemgr import BlockHash, Lease, PendingBlock
from cachemgr.host_contract import HeldShard, HostStore, IncomingShard
from cachemgr.shard import Verdict, address_of
from tests.cachemgr.copier import Copier
from tests.cachemgr.host import Host, chain, fill, payload_of
from tests.cachemgr.node import is_whole, open_node

BLOCKS, LENGTH, TTL_S = 5, 20, 100.0
which = st.integers(0, 1)
index = st.sampled_from([0, 1, 2, 3, 15, 16, 17, 18])
Block = tuple[int, int]
block = st.tuples(which, index)
few = st.lists(block, max_size=4)


class StoreLife(RuleBasedStateMachine):
    leases: Bundle[Lease] = Bundle("leases")
    pending: Bundle[PendingBlock | None] = Bundle("pending")
    held: Bundle[HeldShard] = Bundle("held")
    incoming: Bundle[IncomingShard | None] = Bundle("incoming")

    @initialize()
    def start(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="tensorcache-test-", dir="/dev/shm"))
        self.host = Host(self.directory)
        self.far = open_node(self.host, "far", blocks=64)
        self.cache = self.host.open(node="near", blocks=BLOCKS, ttl_s=TTL_S, remote=self.connect)
        self.chains = [chain(self.cache, LENGTH, seed=seed) for seed in range(2)]
        for hashes in self.chains:
            fill(self.far.cache, hashes)
        self.pins: Counter[BlockHash] = Counter()
        self.names: dict[Lease, list[BlockHash]] = {}
        self.written: set[BlockHash] = set()

    def connect(self, store: HostStore) -> Copier:
        self.store = store
        self.copier = Copier(store, self.far.store)
        return self.copier

    def name(self, block: Block) -> BlockHash:
        return self.chains[block[0]][block[1]]

    @rule(target=leases, which=which, fetch=st.booleans())
    def acquire(self, which: int, fetch: bool) -> Lease:
        """A lease that fetches has at its end all that had room."""
        hashes = self.chains[which][:4]
        lease = self.cache.acquire(hashes, deadline=self.host.clock.now + 1 if fetch else None)
        self.copier.settle()
        assert lease.ready
        self.names[lease] = hashes[: lease.blocks]
        self.pins.update(self.names[lease])
        return lease

    @rule(lease=leases)
    def restore(self, lease: Lease) -> None:
        if lease not in self.names:
            return
        names, got = self.names[lease], []

        def sink(blocks: range, payloads: object) -> None:
            for block, payload in zip(blocks, payloads, strict=True):  # type: ignore[call-overload]
                assert payload.tobytes() == payload_of(names[block]).tobytes()
                got.append(block)

        assert self.cache.restore(lease, first=0, sink=sink) == len(got) == len(names)

    @rule(lease=consumes(leases))
    def release(self, lease: Lease) -> None:
        lease.release()
        self.unpin(self.names.pop(lease))

    @rule(target=pending, block=block)
    def prepare(self, block: Block) -> PendingBlock | None:
        which, index = block
        reserved = self.cache.prepare(self.chains[which], index)
        self.check_reserved(self.name(block), reserved)
        if reserved is not None:
            reserved.payload[:] = payload_of(self.name(block))
        return reserved

    @rule(pending=consumes(pending), keep=st.booleans())
    def commit(self, pending: PendingBlock | None, keep: bool) -> None:
        if pending is not None:
            self.written.discard(pending.address.hash)  # type: ignore[attr-defined]
            (self.cache.commit if keep else self.cache.abort)(pending)

    @rule(target=held, block=block)
    def hold_one(self, block: Block) -> HeldShard | None:
        (held,) = self.store.hold([self.name(block)])
        if held is not None:
            assert held.address == address_of(self.chains[block[0]], block[1])
            self.pins[held.address.hash] += 1
        return held

    @rule(blocks=few)
    def hold_some_for_a_while(self, blocks: list[Block]) -> None:
        names = [self.name(block) for block in blocks]
        missing = {names[row] for row in self.store.missing(names)}
        shards = self.store.hold(names)
        for name, held in zip(names, shards, strict=True):
            assert (held is None) == (name in missing or name in self.written)
            assert held is None or is_whole(held)
        self.store.let_go([held for held in shards if held is not None])

    @rule(held=held)
    def read_held(self, held: HeldShard | None) -> None:
        assert held is None or is_whole(held)

    @rule(held=consumes(held), verdict=st.sampled_from([None, None, *Verdict]))
    def let_go(self, held: HeldShard | None, verdict: Verdict | None) -> None:
        if held is None:
            return
        name = held.address.hash
        if verdict in (Verdict.CORRUPT, Verdict.UNREADABLE) and self.pins[name] == 1:
            self.store.reject(held, verdict)
            assert self.cache.lookup([name]) == 0
        self.store.let_go([held])
        self.unpin([name])

    @rule(target=incoming, block=block)
    def reserve(self, block: Block) -> IncomingShard | None:
        incoming = self.store.reserve(address_of(self.chains[block[0]], block[1]))
        self.check_reserved(self.name(block), incoming)
        if incoming is not None:
            incoming.payload[:] = payload_of(incoming.address.hash).data
        return incoming

    @rule(incoming=consumes(incoming), keep=st.booleans())
    def publish(self, incoming: IncomingShard | None, keep: bool) -> None:
        if incoming is None:
            return
        self.written.discard(incoming.address.hash)
        if keep:
            held = self.far.hold_one(incoming.address.hash)
            self.store.publish(incoming, held.header)
            self.far.store.let_go([held])
            assert self.cache.lookup([incoming.address.hash]) == 1
        else:
            self.store.abort(incoming)

    @rule(blocks=few)
    def drop(self, blocks: list[Block]) -> None:
        names = {self.name(block) for block in blocks}
        free = {name for name in names if self.cache.lookup([name]) and not self.pins[name]}
        assert free <= names
        assert self.store.drop([self.name(block) for block in blocks]) >= len(free)
        assert not any(self.cache.lookup([name]) for name in free)

    @rule(seconds=st.sampled_from([1.0, 60.0, 150.0]))
    def wait(self, seconds: float) -> None:
        self.host.clock.now += seconds

    def check_reserved(self, name: BlockHash, reserved: object) -> None:
        if reserved is not None:
            assert name not in self.written, "two write one block"
            assert not self.pins[name], "what is read is written again"
            self.written.add(name)

    def unpin(self, names: list[BlockHash]) -> None:
        for name in names:
            self.pins[name] -= 1

    @invariant()
    def what_is_read_is_here(self) -> None:
        for name, readers in self.pins.items():
            assert not readers or self.cache.lookup([name]) == 1

    @invariant()
    def whole(self) -> None:
        self.cache.check_integrity()
        counts = self.cache.counters()
        assert counts["cache_pins"] == sum(self.pins.values())
        assert counts["cache_resident_blocks"] + len(self.written) <= BLOCKS

    def teardown(self) -> None:
        self.host.close()
        shutil.rmtree(self.directory)


StoreLife.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestStoreLife = StoreLife.TestCase
