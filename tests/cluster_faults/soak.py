"""Random faults for as long as you like: python -m tests.cluster_faults.soak --minutes 10 --seed 7

The seed is printed; the same seed brings the same faults in the same order. Exit code 1 if something broke.
"""

import argparse
import secrets
import sys

from tests.cluster_faults.run import FaultRun, RunOptions

MOST_CHAINS = 1000


def main() -> int:
    parser = argparse.ArgumentParser(description="random faults on a cluster of cache nodes, all checked")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None, help="default: a fresh one, printed")
    parser.add_argument("--nodes", type=int, default=4)
    arguments = parser.parse_args()
    seed = secrets.randbelow(1_000_000) if arguments.seed is None else arguments.seed
    run = FaultRun(
        RunOptions(
            seed, nodes=arguments.nodes, seconds=60 * arguments.minutes,
            chains=min(MOST_CHAINS, int(300 * max(1.0, arguments.minutes))),
        )
    )  # fmt: skip
    run.run()
    for violation in run.ledger.violations:
        print(f"VIOLATED  {violation}", flush=True)
    print(f"seed {seed}: {'violated' if run.ledger.violations else 'all held'}", flush=True)
    return 1 if run.ledger.violations else 0


if __name__ == "__main__":
    sys.exit(main())
