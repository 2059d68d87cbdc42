"""The image for GPU nodes, as far as a text can be checked: no image can be built where the tests run."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "scripts" / "docker"
DOCKERFILE = (FOLDER / "Dockerfile").read_text()
INSTRUCTIONS = [
    re.sub(r"\s*\\\n\s*", " ", text).strip()
    for text in re.findall(r"^(?:[A-Z]+ (?:[^\n]*\\\n)*[^\n]*)", DOCKERFILE, re.MULTILINE)
]


def arguments(instruction: str) -> list[str]:
    return [text.split(" ", 1)[1] for text in INSTRUCTIONS if text.startswith(f"{instruction} ")]


def test_its_extra_and_its_pycuda_are_those_of_pyproject() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    defaults = dict(text.split("=") for text in arguments("ARG"))
    extra = defaults["EXTRA"]
    pycuda = next(text for text in extras[extra] if text.startswith("pycuda=="))
    assert any(text.endswith(f" {pycuda}") for text in arguments("RUN"))
    cuda, server = (re.sub(r"\$\{(\w+)\}", lambda m: defaults[m[1]], text) for text in arguments("FROM"))
    assert f"cuda:{extra.removeprefix('gpu-cu')}." in cuda, "the toolkit of the packages' CUDA"
    assert server.endswith("-py3")


def test_the_server_is_not_root_and_a_token_is_its_health() -> None:
    (user,) = arguments("USER")
    assert all(int(number) > 0 for number in user.split(":"))
    (health,) = arguments("HEALTHCHECK")
    assert "CMD tensorcache probe " in health
    (command,) = arguments("CMD")
    assert command.startswith('["tensorcache", "serve", ')


def test_only_named_parts_of_the_checkout_are_sent_and_no_key() -> None:
    lines = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    sent = {rule[1:] for rule in rules if rule.startswith("!")}
    assert all((ROOT / name).exists() for name in sent)
    rooms = {"backend", "engines", "cachemgr", "scripts"}
    assert rooms | {"pyproject.toml", "README.md", "model_repository", "LICENSE"} == sent
    assert {"**/*.key", "**/secrets"} <= set(rules)
    assert not any(".venv" in name or name == "build" for name in sent)


def test_packages_go_where_the_backend_looks_for_them() -> None:
    model = (ROOT / "backend" / "model.py").read_text()
    assert '"site-packages"' in model
    install = next(text for text in arguments("RUN") if "pip install" in text)
    assert '--target "$ROOMS/site-packages"' in install
    assert "--constraint /opt/tensorcache/scripts/constraints.txt" in install
