"""Host memory: the tightest of the machine and every cgroup above this process."""

from pathlib import Path

import pytest

from engines.errors import ReleaseError
from engines.host_memory import available_bytes, give_back_freed_memory, require_memory

MEMINFO = "MemTotal:       32000000 kB\nMemFree:         1000000 kB\nMemAvailable:   20000000 kB\n"
MACHINE = 20_000_000 * 1024
PIECE, MANY = 64 << 10, 1000  # too small for a mapping of its own


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in ({"proc/meminfo": MEMINFO} | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_this_machine_has_some() -> None:
    assert available_bytes() > 1 << 20


def test_without_cgroups_the_machine_decides(tmp_path: Path) -> None:
    assert available_bytes(_write(tmp_path, {})) == MACHINE


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/\n", {"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "5\n"}, MACHINE),
        ("0::/\n", {"sys/fs/cgroup/memory.max": "3000\n", "sys/fs/cgroup/memory.current": "1000\n"}, 2000),
        (
            "0::/a/b\n",
            {
                "sys/fs/cgroup/a/memory.max": "3000\n",
                "sys/fs/cgroup/a/memory.current": "1000\n",
                "sys/fs/cgroup/a/memory.stat": "anon 100\ninactive_file 400\nslab 1\n",
                "sys/fs/cgroup/a/b/memory.max": "9000\n",
                "sys/fs/cgroup/a/b/memory.current": "100\n",
            },
            2400,
        ),
        (
            "0::/../../host/path\n",
            {"sys/fs/cgroup/memory.max": "700\n", "sys/fs/cgroup/memory.current": "100\n"},
            600,
        ),
        (
            "5:cpu,memory:/docker/x\n4:cpuset:/\n",
            {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "5000\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000\n",
                "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 50\n",
            },
            4050,
        ),
        ("0::/\n", {"sys/fs/cgroup/memory.max": "1000\n", "sys/fs/cgroup/memory.current": "2000\n"}, 0),
    ],
    ids=["no limit", "limit", "limit of a parent", "path of the host", "version 1", "over its limit"],
)
def test_the_tightest_limit_counts(tmp_path: Path, cgroup: str, files: dict[str, str], expected: int) -> None:
    assert available_bytes(_write(tmp_path, {"proc/self/cgroup": cgroup} | files)) == expected


def test_a_need_is_refused_only_where_there_is_less() -> None:
    require_memory(10, purpose="test", available=lambda: 10)
    with pytest.raises(
        ReleaseError, match=r"^memory: expected 11 bytes of free host memory to test, found 10"
    ):
        require_memory(11, purpose="test", available=lambda: 10)


def test_what_was_freed_goes_back_to_the_system() -> None:
    """Even below a piece that is still in use, where the C library keeps it."""
    give_back_freed_memory()  # what others freed before would serve the pieces, and hide them
    before = _resident_bytes()
    pieces = [bytearray(PIECE) for _ in range(MANY)]
    held = pieces.pop()
    assert _resident_bytes() - before > MANY * PIECE // 2
    pieces.clear()
    give_back_freed_memory()
    assert _resident_bytes() - before < MANY * PIECE // 4
    assert len(held) == PIECE


def _resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) * 1024
