"""The backend's process is killed in the middle of a swap: it comes back on the release that should serve."""

import os
import signal
from pathlib import Path

import msgspec
import pytest

from engines import TrustSettings, current_digest, publish_release, roll_back
from engines.manifest import parse_manifest
from tests.e2e.asking import stream
from tests.e2e.conftest import MODEL, Triton
from tests.e2e.test_deploying import resigned
from tests.e2e.test_survival import stub_of
from tests.waiting import wait_until

DIGITS = 16
PROMPT = {"text_input": "The sea is calm tonight. " * 20, "max_tokens": 8}


def bytes_read(pid: int) -> int:
    """What the process asked the system for since it began."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar:"))


@pytest.mark.timeout(200)
@pytest.mark.parametrize("part", [0.1, 1.0], ids=["while it reads", "while it warms up"])
@pytest.mark.parametrize("good", [True, False], ids=["sound", "refused"])
def test_a_process_killed_in_the_middle_of_a_swap_comes_back(
    triton: Triton, signed_demo: tuple[Path, Path, Path], tmp_path: Path, good: bool, part: float
) -> None:
    version, trust = triton.home.repository / MODEL / "1", TrustSettings(keys=(triton.home.public_key,))
    first = current_digest(version)
    before = stream(triton, **PROMPT)
    golden = parse_manifest((signed_demo[0] / "engine.json").read_bytes()).golden
    changes: dict[str, object] = {"release": 2000 + int(10 * part) + 100 * good}
    if not good:
        changes["golden"] = msgspec.structs.replace(golden, token=golden.token + 1)
    release = resigned(signed_demo, tmp_path / "next", **changes)
    weights = sum(path.stat().st_size for path in release.iterdir())
    log = triton.home.root / "triton.log"
    try:
        pid = stub_of(triton, MODEL)
        told, read = log.stat().st_size, bytes_read(pid)
        following = publish_release(release, version, model=MODEL, trust=trust).digest
        wait_until(lambda: bytes_read(pid) - read >= part * weights)
        os.kill(pid, signal.SIGKILL)
        assert "backend.swapper" not in log.read_bytes()[told:].decode(), "the swap was over"
        triton.command.wait_for(f"{MODEL}: its process died", limit_s=20)
        triton.command.wait_for("Triton is serving again", limit_s=90)
        after = stream(triton, **PROMPT)
        assert after.release == (following if good else first)[:DIGITS]
        assert after.text == before.text
        assert after.cached_tokens >= before.input_tokens - 34, "its blocks were lost"
        if not good:
            refused = f"swap to {following[:DIGITS]} refused, {first[:DIGITS]} serves: golden:"
            wait_until(lambda: refused in log.read_text(), limit_s=60)
            wait_until(lambda: triton.metric("swap_refusals_total", model=MODEL, reason="golden") >= 1)
    finally:
        roll_back(version, model=MODEL, trust=trust, to=first)
        wait_until(lambda: stream(triton, **PROMPT).release == first[:DIGITS], limit_s=60)
