"""One minute of random faults: every block and every byte accounted for. `soak` runs longer."""

import os

import pytest

from tests.cluster_faults.run import FaultRun, RunOptions

SEED = 20_240_611


@pytest.mark.timeout(240)
def test_a_minute_of_faults() -> None:
    run = FaultRun(RunOptions(SEED, seconds=40))
    run.run()
    assert run.ledger.violations == []
    committed, ensured = run.ledger.totals()
    assert run.ledger.hits > 100, "too few reads found anything for this to mean something"
    assert ensured > committed / 2 > 100
    left = f"tensorcache_faults-{os.getpid()}_"
    assert [name for name in os.listdir("/dev/shm") if name.startswith(left)] == []
