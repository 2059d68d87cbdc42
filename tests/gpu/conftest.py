"""The tests of a GPU node: collected only when asked for (`make test-gpu`), so that other runs say why in one
line.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.gpu.torch_reference import Precision

if TYPE_CHECKING:
    from tests.gpu.node import Node

PRECISIONS: tuple[Precision, ...] = ("float16", "bfloat16")
FIRST = "test_00_ready.py"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="run the tests that need an NVIDIA GPU")
    parser.addoption("--gpu-precision", choices=PRECISIONS, action="append", help="only this one")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without --gpu only the first file is collected; it says what the others would need."""
    others = collection_path.name.startswith("test_") and collection_path.name != FIRST
    return True if others and not config.getoption("--gpu", default=False) else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Per test, not per session: a session's parameters would take every test in one precision first."""
    if "precision" in metafunc.fixturenames:
        metafunc.parametrize("precision", metafunc.config.getoption("--gpu-precision") or PRECISIONS)


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Node]":
    """SmolLM2 on this machine's GPU 0."""
    from tests.gpu.node import Node  # imports what a machine without a GPU does not have

    made = Node(tmp_path_factory.mktemp("node"))
    yield made
    made.close()
