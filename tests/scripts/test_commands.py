"""The verbs that need no server, run through the command line as a user does."""

import re
import shutil
import stat
from pathlib import Path

import pytest

from backend.settings import read_node_settings
from cachemgr import CacheSecrets, LmdbTierSettings
from engines import generate_signing_key, sign_release
from scripts.backend_layout import lay_out_backend, write_model_config, write_node_config
from scripts.cli import VERBS, main, parser
from scripts.console import seconds_text, size_text
from scripts.demo import judge
from scripts.errors import CommandError, RejectedError, UsageError
from scripts.install import install_packages, serving_packages, smoke_test
from scripts.repository import version_folder
from scripts.streamed_answer import StreamedAnswer

NOBODY = ("--url", "127.0.0.1:1")  # no server listens there, whatever runs on this machine


@pytest.fixture
def signed(small_release: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A signed copy of the small release and the public key."""
    private, public = generate_signing_key(tmp_path / "keys")
    release = tmp_path / "release"
    shutil.copytree(small_release, release)
    sign_release(release, private)
    return release, public


def test_every_verb_has_help_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    names = [re.sub(r".*\.", "", verb.__name__) for verb in VERBS if verb.__name__ != "scripts.benchmarks"]
    for name in names:
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0
        assert f"examples:\n  tensorcache {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["probe", "--http-port", "0"], ["probe", "--http-port", "x"], ["probe", "--limit", "0"],
        ["probe", "--limit", "nan"], ["build", "demo", "--out", "x", "--lanes", "0"], ["nothing"], [],
    ],
)  # fmt: skip
def test_wrong_words_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_keygen_sign_verify(small_release: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    release = tmp_path / "release"
    shutil.copytree(small_release, release)
    keys = tmp_path / "keys"
    assert main(["keygen", str(keys)]) == 0
    assert main(["verify", str(release), "--key", str(keys / "release.pub")]) == 1
    assert "unsigned" in capsys.readouterr().err
    assert main(["sign", str(release), "--key", str(keys / "release.key")]) == 0
    assert main(["verify", str(release), "--key", str(keys / "release.pub"), "--model", "small"]) == 0
    assert "verified" in capsys.readouterr().out
    assert main(["verify", str(release), "--key", str(keys / "release.pub"), "--model", "other"]) == 1
    assert "model: expected a release for 'other', found one for 'small'" in capsys.readouterr().err
    assert main(["keygen", str(keys)]) == 1
    assert "keys are never replaced" in capsys.readouterr().err


def test_deploy_then_verify_the_repository(
    signed: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    release, public = signed
    repository = tmp_path / "models"
    words = ["deploy", "small", str(release), "--model-repo", str(repository), "--key", str(public), *NOBODY]
    assert main(words) == 2
    assert "is not a folder" in capsys.readouterr().err
    repository.mkdir()
    assert main(words) == 0
    assert (repository / "small" / "config.pbtxt").is_file()
    assert "small" in (repository / "small_sync" / "config.pbtxt").read_text()
    assert main(["verify", str(repository / "small"), "--key", str(public)]) == 0
    assert main(["verify", str(repository / "small"), "--key", str(public), "--min-release", "2"]) == 1
    assert "min_release: expected release 2 or later" in capsys.readouterr().err


def test_an_altered_release_is_not_deployed(
    signed: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    release, public = signed
    tokenizer = release / "tokenizer.json"
    tokenizer.write_bytes(tokenizer.read_bytes().replace(b"{", b" ", 1))
    (tmp_path / "models").mkdir()
    words = ["deploy", "small", str(release), "--model-repo", str(tmp_path / "models"), "--key", str(public)]
    assert main(words) == 1
    assert re.search(
        "digest: expected SHA-256 [0-9a-f]{64} of tokenizer.json, found ", capsys.readouterr().err
    )
    assert not (tmp_path / "models" / "small" / "1" / "current").exists()


def test_version_folder(tmp_path: Path) -> None:
    for version in ("1", "2", "10"):
        (tmp_path / "m" / version).mkdir(parents=True)
        (tmp_path / "m" / version / "current").touch()
    assert version_folder(tmp_path / "m") == tmp_path / "m" / "10"
    assert version_folder(tmp_path / "m" / "2") == tmp_path / "m" / "2"
    assert version_folder(tmp_path) is None


def test_secrets_are_what_the_cache_reads(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    assert main(["secret", "new", str(folder)]) == 0
    first = CacheSecrets.load(folder)
    assert main(["secret", "new", str(folder)]) == 0
    assert main(["secret", "new", str(folder), "--rotate"]) == 0
    rotated = CacheSecrets.load(folder)
    assert rotated.naming == first.naming
    assert rotated.tags[1] == first.tags[1]
    assert (first.sealing_key_id, rotated.sealing_key_id) == (1, 2)
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_build_refuses_what_it_cannot_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    junk = tmp_path / "junk.gguf"
    junk.write_bytes(b"PK\x03\x04")
    (tmp_path / "folder").mkdir()
    reasons = {"junk.gguf": "is no GGUF file", "folder": "config.json is missing", "x": "is not there"}
    for source, reason in reasons.items():
        assert main(["build", str(tmp_path / source), "--out", str(tmp_path / "out")]) == 2
        assert reason in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_build_never_replaces_a_folder_that_is_no_release(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    assert main(["build", "demo", "--out", str(tmp_path / "precious")]) == 2


def test_install_lays_out_a_backend_that_imports_from_there_alone(
    tmp_path: Path, signed: tuple[Path, Path]
) -> None:
    backends, models = tmp_path / "backends", tmp_path / "models"
    words = ["install", "--dest", str(backends), "--model-repo", str(models), "--key", str(signed[1])]
    assert main(words) == 0
    assert main(words) == 0  # again: nothing is in the way
    folder = backends / "tensorcache"
    assert {path.name for path in folder.iterdir()} >= {"model.py", "backend", "engines", "cachemgr", "keys"}
    assert not list(folder.rglob("__pycache__")) or (folder / "backend").is_dir()
    (folder / "cachemgr" / "__init__.py").write_text("import nothing_of_this_name\n")
    with pytest.raises(RejectedError, match=r"does not import from .*nothing_of_this_name"):
        smoke_test(folder, python=__import__("sys").executable)


def test_packages_of_a_gpu_node_come_with_its_extra() -> None:
    required = ["numpy==1", 'onnx==2; extra == "tools"', 'torch==3; extra == "gpu-cu13"']
    assert serving_packages(required, None) == ["numpy==1"]
    assert serving_packages(required, "gpu-cu13") == ["numpy==1", "torch==3"]
    with pytest.raises(RejectedError, match="knows no extra gpu-cu12: run `make setup`"):
        serving_packages(required, "gpu-cu12")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("pyenv: python3.12: command not found\n\nNote: See help\n      on versions.\n", "command not found"),
        (
            "WARNING: cached\nERROR: No matching distribution\nwith a hint\n",
            "ERROR: No matching distribution",
        ),
        ("", "no output"),
    ],
)
def test_a_pip_that_fails_is_told_by_the_line_that_matters(tmp_path: Path, said: str, told: str) -> None:
    python = tmp_path / "python"
    (tmp_path / "said").write_text(said)
    python.write_text(f"#!/bin/sh\ncat {tmp_path / 'said'} >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(RejectedError, match=rf"^pip failed: .*{re.escape(told)}$"):
        install_packages(tmp_path, python=str(python))


def test_an_extra_alone_installs_nothing(tmp_path: Path) -> None:
    words = ["--dest", str(tmp_path / "backends"), "--model-repo", str(tmp_path / "models")]
    assert main(["install", *words, "--extra", "gpu-cu13"]) == 2
    assert list(tmp_path.iterdir()) == []


def test_settings_of_a_node_are_kept(tmp_path: Path, signed: tuple[Path, Path]) -> None:
    config = tmp_path / "tensorcache.toml"
    assert config in write_node_config(config, keys=(signed[1],))
    assert (tmp_path / "keys" / "release.pub").read_text() == signed[1].read_text()
    config.write_text("# mine\n")
    assert write_node_config(config, keys=(signed[1],)) == []
    assert config.read_text() == "# mine\n"
    with pytest.raises(UsageError, match="is not a file"):
        write_node_config(tmp_path / "other.toml", keys=(tmp_path / "none.pub",))


def test_tiers_below_are_examples_until_somebody_wants_them(
    tmp_path: Path, signed: tuple[Path, Path]
) -> None:
    config = tmp_path / "tensorcache.toml"
    write_node_config(config, keys=(signed[1],))
    node = read_node_settings(config)
    assert (node.redis.enabled, node.lmdb.enabled, node.log_level) == (False, False, "info")
    before, told, examples = config.read_text().partition("# Tiers below")
    config.write_text(before + told + re.sub(r"^# (?=\[|\w+ = )", "", examples, flags=re.M))
    node = read_node_settings(config)
    assert (node.redis.enabled, node.lmdb.enabled, node.log_level) == (True, True, "debug")
    assert node.redis.password_file == str(tmp_path / "redis-passwords/tensorcache-writer")
    assert node.lmdb == LmdbTierSettings(path=str(tmp_path / "lmdb")), "the examples are the defaults"


def test_model_config_is_written_once_and_names_are_checked(tmp_path: Path) -> None:
    assert len(write_model_config(tmp_path, "llama-8b")) == 2
    text = (tmp_path / "llama-8b_sync" / "config.pbtxt").read_text()
    assert '"llama-8b"' in text
    assert "smollm2" not in text
    assert write_model_config(tmp_path, "llama-8b") == []
    assert len(write_model_config(tmp_path, "llama-8b", replace=True)) == 2
    with pytest.raises(UsageError, match="a model name is"):
        write_model_config(tmp_path, "../x")


def test_backend_layout_keeps_what_an_operator_put_there(tmp_path: Path) -> None:
    folder = lay_out_backend(tmp_path)
    (folder / "tensorcache.toml").write_text("# mine\n")
    (folder / "backend" / "stale.py").touch()
    lay_out_backend(tmp_path)
    assert (folder / "tensorcache.toml").read_text() == "# mine\n"
    assert not (folder / "backend" / "stale.py").exists()


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (StreamedAnswer(text="other", cached_tokens=64, arrivals=[0.1]), "differ"),
        (StreamedAnswer(text="same", cached_tokens=0, arrivals=[0.1]), "cached tokens"),
        (StreamedAnswer(text="same", cached_tokens=64, arrivals=[1.5]), "not faster"),
    ],
)
def test_a_demo_that_does_not_hold_is_rejected(second: StreamedAnswer, reason: str) -> None:
    first = StreamedAnswer(text="same", cached_tokens=0, arrivals=[1.0])
    with pytest.raises(RejectedError, match=reason):
        judge(first, second)


def test_a_demo_that_holds_passes(capsys: pytest.CaptureFixture[str]) -> None:
    judge(
        StreamedAnswer(text="same", cached_tokens=0, arrivals=[1.0]),
        StreamedAnswer(text="same", cached_tokens=64, arrivals=[0.1]),
    )
    assert "10.0 × sooner" in capsys.readouterr().out


def test_sizes_and_times_read_well() -> None:
    assert [size_text(number) for number in (0, 1023, 1536, 3 << 20, 5 << 30)] == [
        "0 B", "1023 B", "1.5 KiB", "3.0 MiB", "5.0 GiB",
    ]  # fmt: skip
    assert [seconds_text(number) for number in (0.0412, 0.9994, 1.24)] == ["41 ms", "999 ms", "1.24 s"]


def test_errors_have_exit_codes() -> None:
    assert {kind.__name__: kind.exit_code for kind in (CommandError, UsageError, RejectedError)} == {
        "CommandError": 1, "UsageError": 2, "RejectedError": 1,
    }  # fmt: skip
    assert parser().prog == "tensorcache"
