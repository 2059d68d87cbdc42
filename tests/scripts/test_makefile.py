"""The Makefile over a stand-in of the command that notes what it is asked: what is made again, and when."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
COMMAND = """#!/bin/sh
echo "$@" >>calls
case $1 in
    build) mkdir -p build/engine/smollm2; echo made >build/engine/smollm2/engine.json ;;
    keygen) mkdir -p build/keys; touch build/keys/release.key build/keys/release.pub ;;
    sign) touch build/engine/smollm2/model.sig ;;
    install) [ -e build/run/tensorcache.toml ] || touch build/run/tensorcache.toml ;;
esac
[ ! -e "fail-$1" ]
"""


class Workshop:
    """A checkout with a Makefile, an environment that counts as set up, and the stand-in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / ".venv" / "bin").mkdir(parents=True)
        (folder / "scripts").mkdir()
        shutil.copyfile(ROOT / "Makefile", folder / "Makefile")
        command = folder / ".venv" / "bin" / "tensorcache"
        command.write_text(COMMAND)
        command.chmod(0o755)
        for number, name in enumerate(
            ("pyproject.toml", "scripts/constraints.txt", ".venv/bin/pip", ".venv/.serving")
        ):
            (folder / name).touch()
            os.utime(folder / name, (1000 + number, 1000 + number))

    def make(self, *words: str, code: int = 0) -> list[str]:
        """The verbs that `make words` ran, with their arguments."""
        (self.folder / "calls").write_text("")
        # settings given to the make that runs these tests are exported to them, and would be ours too
        environment = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
        done = subprocess.run(
            ["make", *words], cwd=self.folder, env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == code, done.stderr
        return (self.folder / "calls").read_text().splitlines()


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


def verbs(calls: list[str]) -> list[str]:
    return [call.split()[0] for call in calls]


def test_an_engine_is_built_again_only_for_other_settings(workshop: Workshop) -> None:
    (first,) = workshop.make("engine")
    assert "--precision int8 --lanes 8" in first
    assert workshop.make("engine") == []
    for setting, expected in (("LANES=4", "--lanes 4"), ("PRECISION=int4", "--precision int4")):
        (call,) = workshop.make("engine", setting)
        assert expected in call
        assert workshop.make("engine", setting) == []


def test_the_bound_of_the_host_tier_is_installed_again_only_if_it_changes(workshop: Workshop) -> None:
    settings = workshop.folder / "build" / "run" / "tensorcache.toml"
    assert verbs(workshop.make("demo"))[-3:] == ["deploy", "install", "demo"]
    settings.write_text("# mine")
    assert verbs(workshop.make("demo")) == ["demo"]
    assert settings.read_text() == "# mine"
    calls = workshop.make("demo", "HOST_BYTES=1000")
    assert verbs(calls) == ["install", "demo"], "what was deployed meanwhile would be undone"
    assert "--host-bytes 1000" in calls[0]
    assert settings.read_text() == "", "the settings of the old bound would be kept"
    assert verbs(workshop.make("demo", "HOST_BYTES=1000")) == ["demo"]


@pytest.mark.parametrize(
    ("verb", "target", "made"),
    [
        ("build", "engine", "build/engine/smollm2/engine.json"),
        ("sign", "sign", "build/engine/smollm2/model.sig"),
        ("keygen", "sign", "build/keys/release.key"),
    ],
)
def test_what_another_make_made_outlives_our_failure(
    workshop: Workshop, verb: str, target: str, made: str
) -> None:
    (workshop.folder / f"fail-{verb}").touch()
    workshop.make(target, code=2)
    assert (workshop.folder / made).is_file()


def test_help_names_every_setting(workshop: Workshop) -> None:
    shown = subprocess.run(
        ["make", "help"], cwd=workshop.folder, capture_output=True, text=True, check=True
    ).stdout
    for setting in ("PRECISION=int8", "LANES=8", "HOST_BYTES=", "HTTP_PORT=8000"):
        assert setting in shown


# -- targets of a GPU node, over a Python that says what it is asked to run --

PYTHON = """#!/bin/sh
echo "$@" >>calls
[ "$2" != scripts.bench.gpu_ready ] || echo 'NVIDIA H100 (80 GiB)'
[ ! -e "fail-$2$3" ]
"""


@pytest.fixture
def node(workshop: Workshop) -> Workshop:
    python = workshop.folder / ".venv" / "bin" / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    (workshop.folder / ".venv" / ".testing").touch()
    return workshop


def test_a_gpu_node_is_asked_for_its_driver_before_anything_else(node: Workshop) -> None:
    (node.folder / "fail-scripts.bench.gpu_ready--driver").touch()
    for target in ("test-gpu", "bench-gpu"):
        assert node.make(target, "EXTRA=gpu-cu13", code=2) == ["-m scripts.bench.gpu_ready --driver"]


def test_missing_libraries_stop_before_the_first_test(node: Workshop) -> None:
    (node.folder / "fail-scripts.bench.gpu_ready").touch()
    *_, last = node.make("test-gpu", code=2)
    assert last == "-m scripts.bench.gpu_ready"


@pytest.mark.parametrize(
    ("setting", "chosen"), [((), ""), (("PRECISION=bfloat16",), "--gpu-precision bfloat16")]
)
def test_checks_of_a_gpu_node_stop_at_the_first_failure(
    node: Workshop, setting: tuple[str, ...], chosen: str
) -> None:
    *_, tests = node.make("test-gpu", *setting)
    assert tests.startswith("-m pytest -x ")
    assert tests.endswith(f"tests/gpu --gpu {chosen}".rstrip())


def test_setup_brings_the_packages_of_a_gpu_node_if_asked(node: Workshop) -> None:
    assert node.make("setup") == []
    (install,) = node.make("setup", "EXTRA=gpu-cu13")
    assert install.endswith("--editable .[tools,gpu-cu13]")


def test_an_extra_is_installed_between_the_two_questions(node: Workshop) -> None:
    _, install, libraries, _ = node.make("test-gpu", "EXTRA=gpu-cu12")
    assert " install " in install
    assert ".[tools,gpu-cu12]" in install, "without the tests' torch, which is for CUDA 13"
    assert libraries == "-m scripts.bench.gpu_ready"


def test_the_numbers_of_a_gpu_go_into_the_readme_with_its_name(node: Workshop) -> None:
    calls = node.make("bench-gpu", "WITHOUT_8B=1", "UPDATE_README=1", "PRECISION=float16")
    assert calls[2] == "bench --only gpu --out build/bench-gpu.json --precision float16 --without-8b"
    update = "-m scripts.readme_numbers build/bench-gpu.json README.md gpu-numbers NVIDIA H100 (80 GiB)"
    assert calls[-1] == update
