"""Random lives of a table that namespaces share, against what their shares promise."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cachemgr.contract import BlockHash, NamespaceShare
from cachemgr.counts import Counts
from cachemgr.shard import Verdict, address_of
from cachemgr.slot_table import SlotTable
from tests.cachemgr.host import Clock

SLOTS = 20
LENGTH = 12
PUBLIC = 2
NAMESPACES = "abcd"
SHARES = [
    {},
    {"a": NamespaceShare(quota=0.3), "b": NamespaceShare(min_share=0.5)},
    {"a": NamespaceShare(quota=0.5, min_share=0.25), "b": NamespaceShare(quota=0.6, min_share=0.25)},
    {"a": NamespaceShare(quota=0.2), "b": NamespaceShare(min_share=0.4), "c": NamespaceShare(min_share=0.6)},
    {"c": NamespaceShare(quota=0.0), "d": NamespaceShare(quota=0.1, min_share=1.0)},
]
who = st.sampled_from(NAMESPACES)
which = st.integers(0, 2)


def name(*what: object) -> BlockHash:
    return BlockHash(blake2b(repr(what).encode(), digest_size=16).digest())


PUBLIC_NAMES = [name("public", depth) for depth in range(PUBLIC)]
CHAINS = {
    (namespace, number): [
        PUBLIC_NAMES[depth] if depth < PUBLIC and number == 2 else name(namespace, number, depth)
        for depth in range(LENGTH)
    ]
    for namespace in NAMESPACES
    for number in range(3)
}


class SharedLife(RuleBasedStateMachine):
    """Four namespaces of three chains each, the last of which begins with blocks that are public."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.table = SlotTable(SLOTS, ttl_s=100.0, erase=lambda slot: None, clock=self.clock, counts=Counts())
        self.table.add_empty(range(SLOTS))
        self.table.set_public(frozenset(PUBLIC_NAMES))
        self.shares: dict[str, NamespaceShare] = {}
        self.leases: list[tuple[str, list[int], list[BlockHash]]] = []
        self.open: list[tuple[str, int, list[BlockHash], int]] = []

    @contextmanager
    def acting(self, actor: str | None) -> Iterator[None]:
        """What a step of one namespace, or of none, must not do to the others."""
        before = dict(self.table.usage())
        yield
        after = self.table.usage()
        for namespace, share in self.shares.items():
            quota = int(share.quota * SLOTS)
            floor = min(int(share.min_share * SLOTS), quota)
            assert after[namespace] <= max(quota, before[namespace]), "more than its quota"
            if namespace != actor:
                assert after[namespace] <= before[namespace], "somebody else's blocks count to it"
                assert after[namespace] >= min(floor, before[namespace]), "less than its minimum share"

    @rule(namespace=who, number=which, count=st.integers(1, LENGTH), leave_open=st.booleans())
    def make(self, namespace: str, number: int, count: int, leave_open: bool) -> None:
        chain = CHAINS[namespace, number]
        for index in range(count):
            with self.acting(namespace):
                slot = self.table.reserve(chain, index, namespace=namespace)
                if slot is None:
                    continue
                if leave_open and index == count - 1:
                    self.open.append((namespace, slot, chain, index))
                else:
                    self.table.publish(slot, address_of(chain, index), chain)

    @precondition(lambda self: self.open)
    @rule(write=st.booleans())
    def finish(self, write: bool) -> None:
        namespace, slot, chain, index = self.open.pop(0)
        with self.acting(namespace):
            if write:
                self.table.publish(slot, address_of(chain, index), chain)
            else:
                self.table.cancel(chain[index])

    @rule(namespace=who, number=which)
    def acquire(self, namespace: str, number: int) -> None:
        chain = CHAINS[namespace, number]
        with self.acting(namespace):
            slots = self.table.pin(chain, namespace=namespace)
        self.leases.append((namespace, slots, chain))

    @precondition(lambda self: self.leases)
    @rule(corrupt=st.booleans())
    def release(self, corrupt: bool) -> None:
        namespace, slots, chain = self.leases.pop(0)
        with self.acting(namespace):
            if corrupt and slots:
                self.table.reject(slots[-1], chain[len(slots) - 1], Verdict.CORRUPT)
            self.table.unpin(slots)

    @rule(
        namespace=who, number=which, first=st.integers(0, 3), count=st.integers(1, LENGTH), keep=st.booleans()
    )
    def receive(self, namespace: str, number: int, first: int, count: int, keep: bool) -> None:
        chain = CHAINS[namespace, number]
        for index in range(first, min(first + count, LENGTH)):
            address = address_of(chain, index)
            with self.acting(None):
                slot = self.table.single.reserve(address)
                if slot is not None and keep:
                    self.table.single.publish(slot, address)
                elif slot is not None:
                    self.table.cancel(address.hash)

    @rule(namespace=who, number=which)
    def drop(self, namespace: str, number: int) -> None:
        with self.acting(namespace):
            self.table.single.drop(CHAINS[namespace, number])

    @rule(seconds=st.sampled_from([1.0, 70.0]))
    def wait_and_sweep(self, seconds: float) -> None:
        self.clock.now += seconds
        self.table.sweep()

    @rule(shares=st.sampled_from(SHARES))
    def share(self, shares: dict[str, NamespaceShare]) -> None:
        resident = sum(self.table.usage().values())
        self.table.set_shares(shares)
        self.shares = shares
        assert set(self.table.usage()) == {"", *shares}
        assert self.table.gauges()["cache_resident_blocks"] <= resident + len(self.open)

    @invariant()
    def whole(self) -> None:
        self.table.check_integrity(range(SLOTS))

    @invariant()
    def public_blocks_are_nobodys(self) -> None:
        state = self.table._state
        for public in PUBLIC_NAMES:
            slot = state.index.find(public)
            assert slot is None or state.shares.number_of(slot) == 0


SharedLife.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestSharedLife: Callable[..., object] = SharedLife.TestCase
