"""A vnode that takes nearly all of what its node sends is moved away: rarely, and only if that is on."""

import asyncio
from collections.abc import Mapping

from cachemgr.cluster.moves.balance import BUSY_BYTES_PER_S, Balance
from cachemgr.contract import BlockHash
from cachemgr.ring import NodeId, NodeSpec, RingState, Version, drain_node, move_vnode, position_of
from tests.cachemgr.cluster.moves.cluster import Cluster, Node
from tests.cachemgr.cluster.moves.doubles import chain
from tests.cachemgr.cluster.moves.virtual_time import clock, run


class Members:
    """Membership: what is published wins, unless a test says what it loses to."""

    trouble = ""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.published: list[tuple[float, RingState]] = []
        self.lost_to: Version | None = None
        self.unreachable = False

    async def publish(self, state: RingState, *, replaces: Version) -> Version | None:
        assert replaces == self._cluster.state.version
        self.published.append((clock(), state))
        if self.unreachable:
            await asyncio.sleep(1e6)
        if self.lost_to is None:
            self._cluster.install(state)
        return self.lost_to

    async def nodes(self) -> Mapping[NodeId, NodeSpec]:
        raise AssertionError("nobody asks")


class Rig:
    """Node a of a cluster, its policy, and reads of segments of its vnodes."""

    def __init__(self, **settings: object) -> None:
        self.cluster = Cluster("abc", background=False, **{"balance": True, **settings})
        self.members = Members(self.cluster)
        self.node: Node = self.cluster["a"]
        self.balance = Balance(
            self.node.rings, self.node.peers, membership=self.members,  # type: ignore[arg-type]
            settings=self.cluster.settings, clock=clock,
        )  # fmt: skip
        self.balance.start()

    def segments(self, count: int, *, owner: str = "a") -> list[BlockHash]:
        """Of so many different vnodes of `owner`."""
        found: dict[str, BlockHash] = {}
        for seed in range(1000):
            segment = chain(seed, 1)[0]
            vnode, _, node = self.node.rings.ring.vnode_at(position_of(segment))
            if node == owner:
                found.setdefault(vnode, segment)
        return list(found.values())[:count]

    async def read(self, shares: Mapping[BlockHash, float], seconds: float, *, rate: float = 4.0) -> None:
        """Every second so many bytes, in units of what is busy."""
        for _ in range(int(seconds)):
            for segment, share in shares.items():
                self.balance.on_read(segment, 10, int(share * rate * BUSY_BYTES_PER_S))
            await asyncio.sleep(1)


def test_a_hot_vnode_goes_to_the_least_loaded_node() -> None:
    async def main() -> None:
        rig = Rig()
        hot, cold = rig.segments(2)
        peer_b, peer_c = rig.node.peers.peer(NodeId("b")), rig.node.peers.peer(NodeId("c"))
        assert peer_b is not None
        assert peer_c is not None
        peer_b.load = 0.5
        await rig.read({hot: 0.9, cold: 0.1}, 29)
        assert not rig.members.published, "too early"
        await rig.read({hot: 0.9, cold: 0.1}, 8)
        assert len(rig.members.published) == 1
        vnode, _, owner = rig.node.rings.ring.vnode_at(position_of(hot))
        assert owner == "c"
        assert rig.cluster.state.overrides == {vnode: "c"}
        assert rig.balance.vnode_qps[vnode] == 10
        await rig.balance.close()
        await rig.cluster.close()

    run(main)


def _never(shares: tuple[float, float], *, rate: float = 4.0, owner: str = "a", **settings: object) -> None:
    async def main() -> None:
        rig = Rig(**settings)
        hot, cold = rig.segments(2, owner=owner)
        await rig.read({hot: shares[0], cold: shares[1]}, 100, rate=rate)
        assert not rig.members.published
        await rig.balance.close()
        await rig.cluster.close()

    run(main)


def test_off_by_default() -> None:
    _never((1.0, 0.0), balance=False)


def test_not_where_the_share_is_ordinary() -> None:
    _never((0.79, 0.21))


def test_not_where_nobody_reads_much() -> None:
    _never((1.0, 0.0), rate=0.5)


def test_not_what_others_own() -> None:
    _never((1.0, 0.0), owner="b")


def test_not_a_share_that_comes_and_goes() -> None:
    async def main() -> None:
        rig = Rig()
        first, second = rig.segments(2)
        for _ in range(6):
            await rig.read({first: 1.0}, 20)
            await rig.read({second: 1.0}, 20)
        assert not rig.members.published
        await rig.balance.close()
        await rig.cluster.close()

    run(main)


def test_one_move_a_minute_and_none_of_what_just_came() -> None:
    async def main() -> None:
        rig = Rig()
        first, second, third = rig.segments(3)
        for segment in (first, second, third):
            await rig.read({segment: 1.0}, 40)
        at = [when for when, _ in rig.members.published]
        assert len(at) == 2
        assert at[1] - at[0] >= 60
        vnode = rig.node.rings.ring.vnode_at(position_of(rig.segments(1, owner="b")[0]))[0]
        rig.cluster.install(move_vnode(rig.cluster.state, vnode, "a"))
        came = next(s for s in rig.segments(99) if rig.node.rings.ring.vnode_at(position_of(s))[0] == vnode)
        await rig.read({came: 1.0}, 200)
        assert len(rig.members.published) == 2, "it was just moved here"
        await rig.balance.close()
        await rig.cluster.close()

    run(main)


def test_a_change_that_loses_or_hangs_waits_for_its_turn() -> None:
    async def main() -> None:
        rig = Rig()
        (hot,) = rig.segments(1)
        rig.members.lost_to = rig.cluster.state.version
        await rig.read({hot: 1.0}, 60)
        rig.members.unreachable = True
        await rig.read({hot: 1.0}, 60)
        assert len(rig.members.published) == 2
        assert rig.balance.counters()["cluster_balance_lost_moves_total"] == 2
        await rig.balance.close()
        await rig.cluster.close()

    run(main)


def test_never_to_a_node_that_drains() -> None:
    async def main() -> None:
        rig = Rig()
        rig.cluster.install(drain_node(rig.cluster.state, "b"))
        (hot,) = rig.segments(1)
        await rig.read({hot: 1.0}, 60)
        assert set(rig.cluster.state.overrides.values()) == {"c"}
        await rig.balance.close()
        await rig.cluster.close()

    run(main)
