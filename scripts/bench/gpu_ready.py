"""Whether this machine can run the checks and measurements of a GPU node, and which card it has.

python -m scripts.bench.gpu_ready             # the card's line, or one line on what is missing and exit code
1 python -m scripts.bench.gpu_ready --driver    # asks for a driver and a GPU alone, before anything is
installed
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engines.errors import DeviceError

Import = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class Card:
    """What numbers depend on. `tensorrt` is empty where it was not asked for."""

    name: str
    compute_capability: str
    total_bytes: int
    driver: str
    tensorrt: str = ""

    @property
    def line(self) -> str:
        """For tables and logs."""
        memory = f"{self.total_bytes / 2**30:.0f} GiB"
        card = f"{self.name} ({memory}, compute capability {self.compute_capability})"
        line = f"{card}, driver for CUDA {self.driver}"
        return f"{line}, TensorRT {self.tensorrt}" if self.tensorrt else line


def require_card() -> Card:
    """GPU 0. DeviceError says what to install."""
    from engines.driver import require_driver

    info = require_driver(0)
    return Card(info.name, info.compute_capability, info.total_bytes, info.driver)


def require(load: Import = importlib.import_module) -> Card:
    """GPU 0 with TensorRT, pycuda, cuda-bindings and a torch that sees it. DeviceError names the first
    missing.
    """
    from engines.cuda import open_device
    from engines.trt import library_version

    card = require_card()
    version = library_version()
    open_device(0)
    for module, package in (("cuda.bindings.driver", "cuda-bindings"), ("torch", "torch")):
        try:
            found = load(module)
        except ImportError as error:
            raise _missing(f"{package}: expected its Python package, found none ({error})") from error
    if not found.cuda.is_available():
        raise _missing(f"torch: expected one that sees this GPU, found {found.__version__}")
    return Card(card.name, card.compute_capability, card.total_bytes, card.driver, tensorrt=version)


def _missing(what: str) -> DeviceError:
    from engines.driver import GPU_EXTRAS

    return DeviceError(f"{what}: {GPU_EXTRAS}")


def main(arguments: Sequence[str]) -> int:
    """The exit code; what is missing goes to stderr as one line."""
    try:
        card = require_card() if "--driver" in arguments else require()
    except DeviceError as error:
        print(f"tensorcache: this needs a GPU node: {error}", file=sys.stderr)
        return 1
    print(card.line)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
