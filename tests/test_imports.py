"""The law of imports: who may see which room, who alone speaks to a technology, who reads the environment."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("engines", "cachemgr", "backend", "scripts")
MAY_SEE = {
    "engines": {"engines"},
    "cachemgr": {"cachemgr"},
    "backend": {"backend", "engines", "cachemgr"},
    "scripts": {"scripts", "backend", "engines", "cachemgr"},
}
FACES_ONLY = {"backend": ("engines", "cachemgr")}
IMPORTERS = {  # technology → the modules that may import it
    "onnxruntime": {"engines/ort.py"},
    "triton_python_backend_utils": {"backend/triton.py"},
    "tensorrt": {"engines/trt.py"},
    "tensorrt_rtx": set(),
    "pycuda": {"engines/cuda.py"},
    "cuda": {"engines/cuda_graphs.py"},
    "torch": {"backend/sampling/torch_sampler.py"},
    "transformers": set(),
    "redis": {"cachemgr/redis_client/redis_py.py"},
    "hiredis": {"cachemgr/redis_client/redis_py.py"},
    "lmdb": {"cachemgr/tiers/lmdb_tier/database.py"},
    "grpc": {"cachemgr/cluster/control/grpc_service.py"},
    "mmh3": {"cachemgr/ring/points.py"},
    "datasketches": {"cachemgr/cluster/fetch/hot_keys.py"},
    "pytriton": set(),
    "model_signing": {"engines/signing.py"},
    "sigstore_models": {"engines/signing.py"},
    "rich": {"scripts/console.py"},
    "matplotlib": {"scripts/plots.py"},
    "plotext": {"scripts/plots.py"},
}
ENVIRONMENT = {"backend/environment.py", "scripts/environment.py"}


def sources() -> Iterator[Path]:
    for room in ROOMS:
        yield from sorted((ROOT / room).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every imported module, wherever in the file, as a dotted name with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            inner = [alias.name for alias in node.names if is_module(f"{module}.{alias.name}")]
            yield from ((f"{module}.{name}", node.lineno) for name in inner)
            if len(inner) < len(node.names):
                yield module, node.lineno


def is_module(dotted: str) -> bool:
    """Is this a module of one of our rooms? `from engines import options` is as good as naming it."""
    path = ROOT.joinpath(*dotted.split("."))
    return dotted.split(".")[0] in ROOMS and (path.is_dir() or path.with_suffix(".py").is_file())


def violations(where: str, source: str) -> list[str]:
    """What `source`, lying at `where` (room/file.py), does against the law."""
    tree = ast.parse(source)
    room = where.split("/", 1)[0]
    found = []
    for module, line in imported(tree):
        top = module.split(".", 1)[0]
        at = f"{where}:{line} imports {module}"
        if module.startswith("."):
            found.append(f"{at}: imports are absolute")
        if top == "model":
            found.append(f"{at}: only Triton's stub imports model")
        if top in ("tests", *ROOMS) and top not in MAY_SEE[room]:
            found.append(f"{at}: {room} may not see {top}")
        if top in FACES_ONLY.get(room, ()) and "." in module:
            found.append(f"{at}: {room} sees {top} through its face only")
        if top in IMPORTERS and where not in IMPORTERS[top] and not where.startswith("scripts/bench/"):
            found.append(f"{at}: only {sorted(IMPORTERS[top]) or 'nobody'} may")
    if where not in ENVIRONMENT:
        found += [f"{where}:{line} reads the environment" for line in environment_reads(tree)]
    return found


def environment_reads(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv"):
            yield node.lineno
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from (node.lineno for alias in node.names if alias.name in ("environ", "getenv"))


@pytest.mark.parametrize("path", list(sources()), ids=name_of)
def test_file_keeps_the_law(path: Path) -> None:
    assert violations(name_of(path), path.read_text()) == []


@pytest.mark.parametrize(
    ("where", "source"),
    [
        ("engines/x.py", "import cachemgr"),
        ("engines/x.py", "from backend.errors import BackendError"),
        ("cachemgr/x.py", "def late():\n    import engines.contract"),
        ("backend/x.py", "from engines.contract import Engine"),
        ("backend/x.py", "import cachemgr.arena"),
        ("backend/x.py", "from engines import options"),
        ("backend/x.py", "from scripts import cli"),
        ("backend/x.py", "from . import errors"),
        ("backend/x.py", "from model import TritonPythonModel"),
        ("backend/x.py", "import onnxruntime as ort"),
        ("engines/x.py", "from onnxruntime import InferenceSession"),
        ("cachemgr/x.py", "import redis.asyncio"),
        ("backend/x.py", "import triton_python_backend_utils as pb_utils"),
        ("scripts/x.py", "import tests.conftest"),
        ("engines/x.py", "import os\nos.environ['X']"),
        ("cachemgr/x.py", "from os import getenv"),
    ],
)
def test_law_sees_a_breach(where: str, source: str) -> None:
    assert len(violations(where, source)) == 1


def test_law_allows_what_it_should() -> None:
    assert violations("backend/x.py", "from engines import Engine\nfrom cachemgr import PrefixCache") == []
    assert violations("scripts/x.py", "from engines.gguf import load_gguf") == []
    assert violations("engines/ort.py", "import onnxruntime") == []
    assert violations("scripts/environment.py", "import os\nos.environ") == []


@pytest.mark.parametrize("room", ["engines", "cachemgr"])
def test_face_says_what_it_gives(room: str) -> None:
    """`__all__` is sorted, every name in it is there, and every public name the face imports is in it."""
    tree = ast.parse((ROOT / room / "__init__.py").read_text())
    module = __import__(room)
    names = list(module.__all__)
    assert names == sorted(names)
    assert [name for name in names if not hasattr(module, name)] == []
    public = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == room
        for alias in node.names
    }
    assert public <= set(names)


def test_importing_the_product_is_light() -> None:
    """A node without GPU, TensorRT, Redis, LMDB, builders or test packages can import every room."""
    heavy = (
        "torch transformers tensorrt tensorrt_rtx pycuda redis lmdb grpc datasketches onnx gguf tritonclient "
        "onnxruntime"
    )
    code = f"import sys, engines, cachemgr, backend; print(sorted(set({heavy.split()!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.stderr == ""
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("room", ["backend", "engines", "cachemgr"])
def test_page_one_of_a_room_names_its_modules(room: str) -> None:
    page = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text())) or ""
    named = set(re.findall(r"\w+", page))
    here = {path.stem for path in (ROOT / room).glob("*.py")} - {"__init__"}
    here |= {path.parent.name for path in (ROOT / room).glob("*/__init__.py")}
    assert here - named == set()
