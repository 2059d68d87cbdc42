"""Which Python an environment is made with."""

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent.parent / "scripts" / "find_python.sh"


def find(folder: Path, pythons: dict[str, str], *named: str) -> subprocess.CompletedProcess[str]:
    """Run the script with stand-ins for Python by name and version; a version of "" does not run."""
    for name, version in pythons.items():
        answer = f"echo {version} '/of/{name} here'" if version else "exit 127"
        (folder / name).write_text(f"#!/bin/sh\n{answer}\n")
        (folder / name).chmod(0o755)
    return subprocess.run(
        ["/bin/sh", str(SCRIPT), *named],
        env={"PATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("pythons", "named", "expected"),
    [
        ({"python3": "3 13", "python3.12": "3 12", "python3.11": "3 11"}, (), "python3.12"),
        ({"python3": "3 11", "python3.12": "3 12"}, (), "python3"),
        ({"python3": "3 12", "mine": "3 11"}, ("mine",), "mine"),
        ({"python3": "", "python": "2 7", "python3.11": "3 11"}, ("missing",), "python3.11"),
    ],
)
def test_the_first_that_serves_is_taken(
    tmp_path: Path, pythons: dict[str, str], named: tuple[str, ...], expected: str
) -> None:
    done = find(tmp_path, pythons, *named)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"/of/{expected} here\n", "")


def test_without_one_the_reason_and_the_remedy_are_said(tmp_path: Path) -> None:
    done = find(tmp_path, {"python3": "3 13"})
    assert (done.returncode, done.stdout) == (1, "")
    assert "No Python 3.11 or 3.12 found (only other versions: python3)." in done.stderr
    assert "apt-get install python3.12 python3.12-venv" in done.stderr
