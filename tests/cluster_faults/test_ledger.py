"""The checker sees what it is there for: a check that never fails would prove nothing."""

from tests.cluster_faults.blocks import ChainId
from tests.cluster_faults.ledger import GRACE_S, Ledger, Read

CHAIN = ChainId(0, 1, 4)
OTHER = ChainId(1, 2, 2)


def ledger() -> Ledger:
    made = Ledger()
    made.begun(CHAIN, 1)
    made.committed(CHAIN, range(4))
    made.seen({1: {CHAIN: {0, 1, 2, 3}}, 2: {CHAIN: {0, 1, 3}}})
    return made


def read(restored: int = 4, *, wrong: tuple[int, ...] = (), took_s: float = 0.1, **others: bool) -> Read:
    return Read(2, CHAIN, restored, wrong, took_s, 1.0, **others)


def test_a_run_without_a_fault() -> None:
    made = ledger()
    made.read(read())
    made.read(read(0))
    assert (made.reads, made.hits, made.restored_blocks) == (2, 1, 4)
    assert made.violations == []
    assert made.totals() == (4, 3)


def test_other_bytes_are_seen() -> None:
    made = ledger()
    made.read(read(wrong=(2,)))
    assert made.violations == ["node 2, chain 0/1 of 4: blocks [2] came with other bytes"]


def test_a_late_read_is_seen_unless_its_node_stood_still() -> None:
    made = ledger()
    made.read(read(took_s=1.0 + GRACE_S + 0.1, disturbed=True))
    made.read(read(took_s=1.0 + GRACE_S - 0.1))
    assert made.violations == []
    made.read(read(took_s=1.0 + GRACE_S + 0.1))
    assert made.violations == ["node 2, chain 0/1 of 4: took 1.85 s, deadline 1.00 s"]


def test_a_hit_on_what_nobody_wrote_is_seen() -> None:
    made = ledger()
    made.read(Read(2, OTHER, 0, (), 0.1, 1.0))
    assert made.violations == []
    made.read(Read(2, OTHER, 1, (), 0.1, 1.0))
    assert made.violations == ["node 2, chain 1/2 of 2: nobody wrote it, and 1 blocks came"]


def test_what_had_two_copies_is_missed() -> None:
    made = ledger()
    made.lost({2: {CHAIN: {0, 1, 3}}})
    assert made.violations == []
    made.lost({2: {CHAIN: {0, 3}}})
    assert made.violations == ["chain 0/1 of 4: blocks [1] had two copies, and none is left"]
    made.lost({})
    assert made.violations[1:] == ["chain 0/1 of 4: blocks [0, 1, 3] had two copies, and none is left"]


def test_a_single_copy_at_rest_is_seen() -> None:
    made = ledger()
    made.at_rest({1: {CHAIN: {0, 1, 2, 3}}, 3: {CHAIN: {0, 1, 3}}})
    assert made.violations == []
    made.at_rest({1: {CHAIN: {0, 1, 2, 3}}, 3: {CHAIN: {0, 1}}})
    assert made.violations == ["chain 0/1 of 4: blocks [3] had two copies, and have fewer at rest"]


def test_what_must_be_readable_ends_at_the_first_block_without_two_copies() -> None:
    made = ledger()
    assert made.readable(CHAIN) == 2
    made.twice(CHAIN, 2)
    assert made.readable(CHAIN) == 4
    made.unreadable(2, CHAIN, 1)
    assert made.violations == [
        "node 2, chain 0/1 of 4 (written by node 1): 1 blocks readable, 4 had two copies"
    ]


def test_copies_of_what_was_never_begun_are_no_news() -> None:
    made = ledger()
    made.seen({1: {OTHER: {0}}, 2: {OTHER: {0}}})
    assert made.chains() == [CHAIN]
