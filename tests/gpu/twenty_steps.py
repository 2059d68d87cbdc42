"""Twenty steps over every path of an engine that touches the device, for compute-sanitizer to watch.

python -m tests.gpu.twenty_steps RELEASE_FOLDER PUBLIC_KEY
"""

import sys
from pathlib import Path

import numpy as np

from engines import EngineOptions, LaneId, TrustSettings, load_release_dir, open_engine
from tests.engines.behaviours import decode, export, prefill, some_tokens
from tests.gpu.on_host import OnHost


def main(folder: str, public_key: str) -> None:
    """Prefills in parts, decode steps of one to all lanes, blocks out and in between them."""
    release = load_release_dir(Path(folder), model="smollm2", trust=TrustSettings(keys=(Path(public_key),)))
    engine = OnHost(open_engine(release, EngineOptions()))
    lanes = range(engine.spec.lanes)
    lengths = {lane: 250 + lane for lane in lanes}  # the steps cross the end of the first window
    for lane in lanes:
        prefill(engine, lane, some_tokens(engine, lengths[lane], seed=lane), cuts=[33])
    for step in range(20):
        rows = {lane: (step + 1, lengths[lane]) for lane in lanes if lane <= step % len(lanes)}
        answers = decode(engine, rows)
        assert all(np.isfinite(row).all() for row in answers.values()), f"step {step}"
        for lane in rows:
            lengths[lane] += 1
        if step % 5 == 4:
            engine.import_blocks(LaneId(1), range(3), list(export(engine, 0, range(3))))
    engine.close()
    print("twenty steps done")


if __name__ == "__main__":
    main(*sys.argv[1:])
