"""Installs the peers into an environment of their own: `python -m scripts.bench.peers_install [FOLDER]`."""

import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

from scripts.bench.peers import DEFAULT_PYTHON, PACKAGES, STORE_PACKAGES

# llama.cpp comes as source: without its image models, and for this machine's own instructions
_CMAKE = "CMAKE_ARGS=-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"


def install(folder: Path) -> int:
    """Create the environment, install every peer; one that fails leaves the others. Exit code."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    failed = []
    for kind, package in (*PACKAGES.items(), *STORE_PACKAGES.items()):
        print(f"installing {package} (llama.cpp is compiled: some minutes) …", flush=True)
        command = ["env", _CMAKE, str(python), "-m", "pip", "install", "--no-input", *package.split()]
        if subprocess.run(command, timeout=3600, check=False).returncode:
            failed.append(kind)
    if failed:
        print(f"not installed: {', '.join(failed)}; their rows will say so", file=sys.stderr)
        return 1
    print(f"peers are ready in {folder}: run `make bench`")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """FOLDER is the environment to make; default build/peers/venv."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return install(Path(arguments[0]) if arguments else DEFAULT_PYTHON.parent.parent)


if __name__ == "__main__":
    sys.exit(main())
