"""Where Triton's parts are found and how it is started."""

from pathlib import Path

import pytest

from scripts.errors import TritonError, UsageError
from scripts.triton_runtime import (
    TritonAddress,
    TritonInstall,
    TritonLaunch,
    find_triton,
    lay_out_python_backend,
    models_of,
    remove_leftovers,
    server_command,
    server_environment,
)


@pytest.fixture
def launch(tmp_path: Path) -> TritonLaunch:
    return TritonLaunch(
        address=TritonAddress(http_port=9000, grpc_port=9001, metrics_port=9002),
        backends=tmp_path / "b", model_repository=tmp_path / "m", models=("smollm2", "smollm2_sync"),
        shm_prefix="tensorcache-1-abcd_", log=tmp_path / "log", admin_key="sesame",
    )  # fmt: skip


def test_the_wheel_has_every_part() -> None:
    install = find_triton()
    for path in (install.server, install.stub, install.python_backend, *install.libraries):
        assert path.exists()


def test_an_installation_is_checked(tmp_path: Path) -> None:
    with pytest.raises(TritonError, match=r"Triton is incomplete: .*/backends/python is missing"):
        find_triton(tmp_path)


def test_the_command_names_models_ports_and_guards_the_control_api(launch: TritonLaunch) -> None:
    command = server_command(find_triton(), launch)
    assert [word for word in command if word.startswith("--load-model")] == [
        "--load-model=smollm2", "--load-model=smollm2_sync",
    ]  # fmt: skip
    assert {"--http-port=9000", "--grpc-port=9001", "--metrics-port=9002"} <= set(command)
    assert {"--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--metrics-address=127.0.0.1"} <= set(
        command
    )
    guard = "model-repository,shared-memory,trace,logging,statistics:admin-key=sesame"
    assert {f"--http-restricted-api={guard}", f"--grpc-restricted-protocol={guard}"} <= set(command)
    assert "--backend-config=python,shm-region-prefix-name=tensorcache-1-abcd_" in command


def test_the_environment_is_this_python_and_nothing_of_the_checkout(tmp_path: Path) -> None:
    install = TritonInstall(tmp_path, tmp_path, tmp_path, libraries=(Path("/one"), Path("/two")))
    inherited = {"PATH": "/bin", "PYTHONPATH": "/checkout", "LD_LIBRARY_PATH": "/three", "HOME": "/h"}
    made = server_environment(install, inherited, config=tmp_path / "tensorcache.toml")
    assert made["LD_LIBRARY_PATH"] == "/one:/two:/three"
    assert made["PATH"].endswith(":/bin")
    assert "PYTHONPATH" not in made
    assert made["TENSORCACHE_CONFIG"] == str((tmp_path / "tensorcache.toml").resolve())
    assert made["HOME"] == "/h"
    assert inherited["PYTHONPATH"] == "/checkout"


def test_the_python_backend_is_laid_out_once(tmp_path: Path) -> None:
    lay_out_python_backend(find_triton(), tmp_path)
    stub = tmp_path / "python" / "triton_python_backend_stub"
    before = stub.stat().st_ino, stub.stat().st_mtime_ns
    assert stub.stat().st_mode & 0o111
    lay_out_python_backend(find_triton(), tmp_path)
    assert (stub.stat().st_ino, stub.stat().st_mtime_ns) == before


def test_models_are_the_folders_with_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no model"):
        models_of(tmp_path)
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.pbtxt").touch()
    (tmp_path / "not_a_model").mkdir()
    assert models_of(tmp_path) == ("a", "b")
    with pytest.raises(UsageError, match="is not a folder"):
        models_of(tmp_path / "x")


def test_leftovers_of_our_prefix_alone_are_removed(tmp_path: Path) -> None:
    for name in (
        "tensorcache-1-abcd_x",
        "tensorcache-1-abcd_y",
        "tensorcache-2-beef_x",
        "tensorcache_local.arena",
    ):
        (tmp_path / name).touch()
    assert sorted(remove_leftovers("tensorcache-1-abcd_", tmp_path)) == [
        "tensorcache-1-abcd_x",
        "tensorcache-1-abcd_y",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "tensorcache-2-beef_x",
        "tensorcache_local.arena",
    ]
    with pytest.raises(AssertionError, match="this short"):
        remove_leftovers("t", tmp_path)


def test_regions_of_dead_processes_are_removed_and_those_in_use_or_young_stay(tmp_path: Path) -> None:
    folder, proc = tmp_path / "shm", tmp_path / "proc"
    (proc / "7").mkdir(parents=True)
    folder.mkdir()
    for name in ("used", "dead", "dead_too"):
        (folder / f"tensorcache-1-abcd_{name}").touch()
    (proc / "7" / "maps").write_text(f"7f00-7f01 rw-s 0 00:1 1   {folder}/tensorcache-1-abcd_used\n")
    old = [folder / "tensorcache-1-abcd_used", folder / "tensorcache-1-abcd_dead"]
    later = max(path.stat().st_ctime for path in old) + 100
    found = remove_leftovers("tensorcache-1-abcd_", folder, users=(7, 8), proc=proc)
    assert found == []  # all are young
    found = remove_leftovers("tensorcache-1-abcd_", folder, users=(7, 8), proc=proc, now=later)
    assert sorted(found) == ["tensorcache-1-abcd_dead", "tensorcache-1-abcd_dead_too"]
    assert [path.name for path in folder.iterdir()] == ["tensorcache-1-abcd_used"]
    assert remove_leftovers("tensorcache-1-abcd_", folder, users=(), proc=proc, now=later)


def test_without_a_living_stub_young_regions_stay_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "tensorcache-1-abcd_x").touch()
    assert remove_leftovers("tensorcache-1-abcd_", tmp_path, users=()) == []
    assert remove_leftovers("tensorcache-1-abcd_", tmp_path) == ["tensorcache-1-abcd_x"]
