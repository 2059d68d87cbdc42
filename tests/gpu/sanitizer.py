"""NVIDIA's compute-sanitizer over a small program: memory errors of kernels, which no answer need show."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

MISSING = (
    "compute-sanitizer: expected on PATH or in /usr/local/cuda*/bin, found none: install the CUDA toolkit, "
    "or of NVIDIA's packages cuda-sanitizer-<CUDA version> alone"
)
LIMIT_S = 1500
_FOUND_ERRORS = 86


def find_sanitizer(toolkits: Path = Path("/usr/local"), *, path: str | None = None) -> Path:
    """The newest there is. Fails with what to install; `path` None means this process's PATH."""
    found = shutil.which("compute-sanitizer", path=path)
    candidates = sorted(toolkits.glob("cuda*/bin/compute-sanitizer"), reverse=True)
    if found is None and not candidates:
        raise AssertionError(MISSING)
    return Path(found) if found else candidates[0]


def memcheck(sanitizer: Path, program: Sequence[str]) -> str:
    """Run `program` under the tool's memcheck; its summary. Fails with the tool's first words on an error.

    Errors that API calls return are left to the caller, who may ask on purpose what is not there.
    """
    command = [
        str(sanitizer), "--tool", "memcheck", "--report-api-errors", "no", "--target-processes", "all",
        "--error-exitcode", str(_FOUND_ERRORS), *program,
    ]  # fmt: skip
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S, check=False
    )
    said = [line for line in done.stdout.splitlines() if line.startswith("========= ")]
    if done.returncode == _FOUND_ERRORS:
        raise AssertionError("compute-sanitizer found errors:\n" + "\n".join(said[:40]))
    ending = "\n".join(done.stdout.splitlines()[-20:])
    assert done.returncode == 0, f"the program under compute-sanitizer exited {done.returncode}:\n{ending}"
    summary = [line for line in said if "ERROR SUMMARY" in line]
    assert summary, f"compute-sanitizer gave no summary:\n{ending}"
    return summary[-1].removeprefix("========= ")
