"""Who reads bytes that others can write finds each forgery to be what it is: never whole, never a crash."""

import numpy as np
import numpy.typing as npt
import pytest

import cachemgr.cache
from cachemgr.cluster.bulk.incoming import IncomingBlock, Outcome
from cachemgr.contract import BlockFormat, BlockHash
from cachemgr.shard import (
    HEADER_NBYTES,
    BlockAddress,
    ShardOpener,
    ShardSealer,
    Verdict,
    address_of,
    slot_nbytes,
)
from tests.cachemgr.forgeries import Forgery, cuts, forgeries, judge
from tests.cachemgr.host import FORMAT, SECRETS, Host, chain, fill, payload_of, read
from tests.cachemgr.node import open_node

SMALL = BlockFormat(b"0123456789abcdef", "bfloat16", 3, 2, 2, block_tokens=4)
TAGS = {1: bytes(range(32)), 7: bytes(range(32, 64))}
NAMES = [BlockHash(bytes([row + 1]) * 16) for row in range(40)]
AT = 17
ALL = forgeries(FORMAT, tags=SECRETS.tags)


def sealed(index: int, block_format: BlockFormat = SMALL) -> bytes:
    payload = np.random.default_rng(index).integers(0, 256, block_format.payload_nbytes, np.uint8)
    return ShardSealer(block_format, TAGS).seal(address_of(NAMES, index), payload) + payload.tobytes()


@pytest.mark.parametrize("forgery", forgeries(SMALL, tags=TAGS), ids=lambda forgery: forgery.name)
def test_an_opener_finds_what_it_is(forgery: Forgery) -> None:
    opener, shard = ShardOpener(SMALL, TAGS), sealed(AT)
    assert judge(shard, address_of(NAMES, AT), opener) is Verdict.WHOLE
    forged = forgery.forge(shard, sealed(AT + 1))
    assert len(forged) == len(shard)
    if forged != shard:  # a field may have that value already
        assert judge(forged, address_of(NAMES, AT), opener) is forgery.verdict


def test_whatever_is_cut_or_added_is_corrupt() -> None:
    opener, shard, address = ShardOpener(SMALL, TAGS), sealed(AT), address_of(NAMES, AT)
    for cut in range(len(shard)):
        assert judge(shard[:cut], address, opener) is Verdict.CORRUPT, cut
    assert set(cuts(SMALL.payload_nbytes)) < set(range(len(shard)))
    for more in (b"\0", shard[-16:], shard):
        assert judge(shard + more, address, opener) is Verdict.CORRUPT
    for length in (0, 1, 111, 112, 127, 129, 256, 1 << 20):
        assert opener.begin((shard * 9000)[:length], address) is Verdict.CORRUPT


def test_two_valid_shards_exchanged_are_both_corrupt() -> None:
    opener = ShardOpener(SMALL, TAGS)
    one, other = sealed(AT), sealed(AT + 1)
    assert judge(one, address_of(NAMES, AT + 1), opener) is Verdict.CORRUPT
    assert judge(other, address_of(NAMES, AT), opener) is Verdict.CORRUPT
    for changed in (
        BlockAddress(NAMES[AT], NAMES[0], NAMES[16], AT),
        BlockAddress(NAMES[AT], NAMES[16], NAMES[0], AT),
        BlockAddress(NAMES[AT], NAMES[16], NAMES[16], AT + 16),
    ):
        assert judge(one, changed, opener) is Verdict.CORRUPT, "another chain with a block of this name"


class Scene:
    """Two prompts of one block for each forgery: one to be spoiled, and a neighbour that stays whole."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.cache = host.open(blocks=3 * len(ALL))
        self.prompts = [chain(self.cache, 1, seed=seed) for seed in range(2 * len(ALL))]
        for prompt in self.prompts:
            assert fill(self.cache, prompt) == 1
        self.spoiled: list[tuple[Forgery, list[BlockHash]]] = []
        self._forged: list[tuple[npt.NDArray[np.uint8], bytes]] = []

    def spoil(self) -> None:
        """Put every forgery into its slot, behind everybody's back."""
        slots: dict[bytes, npt.NDArray[np.uint8]] = {}
        for path in self._host.arenas():
            rows = np.memmap(path, np.uint8, "r+").reshape(-1, slot_nbytes(FORMAT.payload_nbytes))
            slots |= {row[32:48].tobytes(): row for row in rows if row[8:12].tobytes() == b"TCKV"}
        for at, forgery in enumerate(ALL):
            prompt, neighbour = self.prompts[2 * at : 2 * at + 2]
            slot = slots[prompt[0]]
            shard = slot.tobytes()
            forged = forgery.forge(shard, slots[neighbour[0]].tobytes())
            if forged != shard:  # a field may have that value already
                slot[:] = np.frombuffer(forged, np.uint8)
                self.spoiled.append((forgery, prompt))
                self._forged.append((slot, forged))
        assert len(self.spoiled) > 100

    def kept(self) -> list[bool]:
        """Of which forgeries every byte is still there."""
        return [slot.tobytes() == forged for slot, forged in self._forged]

    def erased(self) -> list[bool]:
        """Which slots hold nothing any more."""
        return [not slot[8:12].any() for slot, _ in self._forged]


@pytest.fixture
def scene(host: Host, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr(cachemgr.cache, "_REFRESH_INTERVAL_S", 3600.0)
    return Scene(host)


def test_a_cache_finds_each_in_its_own_arena(scene: Scene) -> None:
    cache = scene.cache
    scene.spoil()
    for forgery, prompt in scene.spoiled:
        before = cache.counters()
        assert read(cache, prompt) == 0, forgery.name
        after = cache.counters()
        for verdict in (Verdict.CORRUPT, Verdict.UNREADABLE):
            counter = f"cache_{verdict.value}_blocks_total"
            assert after[counter] - before[counter] == (verdict is forgery.verdict), forgery.name
    corrupt = [forgery.verdict is Verdict.CORRUPT for forgery, _ in scene.spoiled]
    assert scene.erased() == corrupt
    assert all(kept or gone for kept, gone in zip(scene.kept(), corrupt, strict=True))
    for _, prompt in scene.spoiled:
        assert (fill(cache, prompt), read(cache, prompt)) == (1, 1)
    assert cache.counters()["cache_pins"] == 0
    cache.check_integrity()


def test_a_cache_that_starts_finds_each_in_what_it_takes_over(scene: Scene, host: Host) -> None:
    scene.cache.close()
    scene.spoil()
    cache = host.open(blocks=3 * len(ALL))
    for forgery, prompt in scene.spoiled:
        assert read(cache, prompt) == 0, forgery.name
    for _, prompt in scene.spoiled:
        assert (fill(cache, prompt), read(cache, prompt)) == (1, 1)
    cache.check_integrity()


def test_a_cache_finds_each_in_the_arena_of_another_process(scene: Scene, host: Host) -> None:
    reader = host.open(blocks=6 * len(ALL))

    def scan() -> None:
        reader.acquire([], deadline=None).release()
        reader._refresh_arenas()

    scan()
    assert {read(reader, prompt) for prompt in scene.prompts} == {1}
    scene.spoil()
    for forgery, prompt in scene.spoiled:
        assert read(reader, prompt) == 0, forgery.name
    assert reader.counters()["cache_stale_blocks_total"] == len(scene.spoiled)
    scan()
    for forgery, prompt in scene.spoiled:
        assert read(reader, prompt) == 0, forgery.name
    assert all(scene.kept()), "what others write is theirs to remove"
    reader.check_integrity()


def receive(block: IncomingBlock, payload: bytes) -> Outcome:
    while block.missing:
        room = block.room(100)
        start = block.nbytes - block.missing
        room[:] = payload[start : start + len(room)]
        block.advance(len(room))
    return block.finish()


@pytest.mark.parametrize("forgery", ALL, ids=lambda forgery: forgery.name)
def test_a_peer_that_sends_it_brings_nothing(host: Host, forgery: Forgery) -> None:
    near, far = open_node(host, "near"), open_node(host, "far", blocks=2)
    names = chain(near.cache, 3)
    fill(near.cache, names)
    shards = [near.hold_one(name) for name in names]
    whole = [shard.header + bytes(shard.payload) for shard in shards]
    forged = forgery.forge(whole[1], whole[2])
    if forged == whole[1]:
        return
    for _ in range(3):  # a slot that did not come back would be missed
        block = IncomingBlock(far.store, address_of(names, 1), forged[:HEADER_NBYTES])
        outcome = receive(block, forged[HEADER_NBYTES:])
        if forgery.verdict is Verdict.UNREADABLE:
            assert outcome is Outcome.NOT_KEPT
        else:
            assert outcome in (Outcome.FOREIGN, Outcome.CORRUPT)
        assert far.store.missing(names) == [0, 1, 2]
    whole_one = IncomingBlock(far.store, address_of(names, 1), whole[1][:HEADER_NBYTES])
    assert receive(whole_one, whole[1][HEADER_NBYTES:]) is Outcome.PUBLISHED
    assert bytes(far.hold_one(names[1]).payload) == payload_of(names[1]).tobytes()


@pytest.mark.parametrize("length", [0, 1, 111, 112, 127, 129, 256])
def test_a_header_of_another_length_brings_nothing(host: Host, length: int) -> None:
    near, far = open_node(host, "near"), open_node(host, "far", blocks=2)
    names = chain(near.cache, 1)
    fill(near.cache, names)
    header = (near.hold_one(names[0]).header * 2)[:length]
    block = IncomingBlock(far.store, address_of(names, 0), header)
    assert not block.kept
    assert receive(block, payload_of(names[0]).tobytes()) is Outcome.FOREIGN
    assert far.store.missing(names) == [0]
