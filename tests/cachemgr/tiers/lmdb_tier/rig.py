"""A tier on a folder, and what the tests of the LMDB tier ask of it."""

import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from cachemgr.tiers.lmdb_tier import LmdbTierSettings
from cachemgr.tiers.lmdb_tier.tier import LmdbTier
from tests.cachemgr.tiers.rig import eventually

MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[4]


def settings_of(path: Path, **options: object) -> LmdbTierSettings:
    promptly: dict[str, object] = {"batch_s": 0.01, "retry_s": 0.05, "max_bytes": 16 * MIB}
    return LmdbTierSettings(path=str(path), **(promptly | options))  # type: ignore[arg-type]


@asynccontextmanager
async def opened(path: Path, *, usable: bool = True, **options: object) -> AsyncIterator[LmdbTier]:
    """A tier that runs; closed at the end."""
    tier = LmdbTier(settings_of(path, **options))
    await tier.start()
    try:
        if usable:
            await eventually(lambda: tier.usable)
        yield tier
    finally:
        await tier.close()


def count(tier: LmdbTier, name: str) -> int:
    return int(tier.counters()[name])


def files_nbytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@contextmanager
def child(script: str, *arguments: object) -> Iterator["subprocess.Popen[str]"]:
    """A process that runs a script of this folder; killed at the end. What it says is read line by line."""
    command = [sys.executable, str(Path(__file__).with_name(script)), *map(str, arguments)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        env={"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def line_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line, "the child ended"
    return line


def end(process: "subprocess.Popen[str]") -> None:
    """Have a child that waits for a line end by itself."""
    process.communicate("\n", timeout=20)
    assert process.returncode == 0
