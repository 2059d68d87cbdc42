"""Runs targets under atheris, coverage-guided: `python -m tests.fuzz.run TARGET|all --seconds 60`.

Begins with the kept seeds and the targets' examples. What is found lies in build/fuzz/<target>/ with the
command that replays it; then the exit status is 1. `--replay FILE` runs one input as it is.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.fuzz.contract import HERE, load, names, seeds

ROOT = HERE.parents[1]
BUILT = ROOT / "build" / "fuzz"
INSTRUMENTED = ("backend", "cachemgr", "engines", "scripts")
LONGEST_INPUT = 4096
INPUT_SECONDS = 20
"""One input that takes longer hangs."""
MEMORY_MB = 3072
_GRACE_S = 120


def main(words: list[str]) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description=__doc__)
    parser.add_argument("target", help=f"all, one of {', '.join(names())}, or a module")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--replay", type=Path, help="one input, without atheris")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.target not in ("all", *names()) and "." not in given.target:
        parser.error(f"there is no target {given.target!r}")
    if given.replay is not None:
        load(given.target).target(given.replay.read_bytes())
        return 0
    if importlib.util.find_spec("atheris") is None:
        print("atheris is not installed; there are wheels for CPython 3.11 and 3.12 on Linux, x86-64")
        return 2
    if given.inside is not None:
        fuzz(given.target, given.seconds, corpus=given.inside)
    chosen = names() if given.target == "all" else [given.target]
    found = [crash for name in chosen for crash in search(name, seconds=given.seconds)]
    for name, path in found:
        print(f"found: {path}\n  replay: .venv/bin/python -m tests.fuzz.run {name} --replay {path}")
    return 1 if found else 0


def search(name: str, *, seconds: int) -> list[tuple[str, Path]]:
    """What a process of its own finds in a target: crashes of any kind, hangs, too much memory."""
    folder = BUILT / name
    folder.mkdir(parents=True, exist_ok=True)
    before = set(folder.glob("*-*"))
    with tempfile.TemporaryDirectory(prefix="tensorcache-fuzz-") as scratch:
        corpus = Path(scratch) / "corpus"
        corpus.mkdir()
        for data in [*(path.read_bytes() for path in seeds(name)), *load(name).EXAMPLES]:
            (corpus / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
        command = [sys.executable, "-m", "tests.fuzz.run", name, "--seconds", str(seconds)]
        failed = True
        with (folder / "log").open("wb") as log, contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                [*command, "--inside", str(corpus)], cwd=ROOT, env={**os.environ, "TMPDIR": scratch},
                stdout=log, stderr=subprocess.STDOUT, timeout=seconds + _GRACE_S, check=False,
            )  # fmt: skip
            failed = done.returncode != 0
        kept = folder / "corpus"
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(corpus, kept)
    lines = (folder / "log").read_text(errors="replace").splitlines()
    print(f"{name}: {next((line for line in reversed(lines) if 'runs in' in line), 'stopped')}")
    found = sorted(set(folder.glob("*-*")) - before)
    if failed and not found:  # a hang among them, which the engine did not see itself
        found = [folder / "log"]
    return [(name, path.relative_to(ROOT)) for path in found]


def fuzz(name: str, seconds: int, *, corpus: Path) -> None:
    """Does not return: the engine ends the process."""
    import atheris

    logging.disable(logging.CRITICAL)
    with atheris.instrument_imports(include=list(INSTRUMENTED)):
        target = load(name).target

    def kept(data: bytes) -> None:
        try:
            target(data)
        except BaseException:  # written here as well: the engine does not always come to it
            digest = hashlib.sha1(data, usedforsecurity=False).hexdigest()  # as the engine names it
            (BUILT / name / f"crash-{digest}").write_bytes(data)
            raise

    limits = {
        "max_total_time": seconds, "timeout": INPUT_SECONDS, "max_len": LONGEST_INPUT, "print_final_stats": 0,
        "rss_limit_mb": MEMORY_MB, "artifact_prefix": f"{BUILT / name}/", "reload": 0,
    }  # fmt: skip
    atheris.Setup([name, *(f"-{key}={value}" for key, value in limits.items()), str(corpus)], kept)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
