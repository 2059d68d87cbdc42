"""From a new key to a public prefix, with the command alone, on a server that runs all the while."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.cli import main
from tests.e2e.conftest import MODEL
from tests.e2e.guarded import Guarded
from tests.waiting import wait_until

PREFIX = list(range(5, 5 + 70))
Capture = pytest.CaptureFixture[str]
Tell = Callable[..., int]


@pytest.fixture(scope="module")
def key_files(guarded: Guarded, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Credentials of an admin and of two tenants, as the command made them."""
    folder = tmp_path_factory.mktemp("keys")
    made = {name: folder / name for name in ("ops", "tenant-a", "tenant-b")}
    for name, file in made.items():
        file.touch(mode=0o600)
        with pytest.MonkeyPatch.context() as patch, file.open("w") as out:
            patch.setattr("sys.stdout", out)
            verbs = ["--verbs", "infer", "admin"] if name == "ops" else []
            home = str(guarded.triton.home.root)
            assert main(["acl", "new-key", name, "--models", MODEL, "--home", home, *verbs]) == 0
    return made


@pytest.fixture
def tell(guarded: Guarded, key_files: dict[str, Path]) -> Tell:
    def run(*words: str, who: str = "ops", model: str = MODEL) -> int:
        url = guarded.triton.http_url
        return main(["public", *words, "--model", model, "--url", url, "--key-file", str(key_files[who])])

    return run


def test_a_prefix_is_shared_from_the_command_on_until_it_is_removed(
    guarded: Guarded, key_files: dict[str, Path], tell: Tell, tmp_path: Path, capsys: Capture
) -> None:
    wait_until(lambda: tell("list") == 0)  # the server has taken the new keys up
    assert "0 public" in capsys.readouterr().out
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(PREFIX))
    assert tell("add", "handbook", "--ids", str(ids)) == 0
    assert re.search(r"added handbook, 70 tokens, 4 blocks are shared", capsys.readouterr().out)

    def cached(who: str, tail: int) -> int:
        """Of a prompt that goes on from the prefix."""
        prompt = [*PREFIX, *range(tail, tail + 40)]
        body = {"input_ids": prompt, "max_tokens": 1, "api_key": key_files[who].read_text().strip()}
        status, text = guarded.post(f"/v2/models/{MODEL}/generate", body)
        assert status == 200, text
        return int(json.loads(text)["num_cached_tokens"])

    assert cached("tenant-a", 100) == 0
    assert cached("tenant-b", 100) == 64  # whole blocks, and nothing of what the other one asked further
    assert tell("list") == 0
    assert "by ops" in capsys.readouterr().out
    assert tell("remove", "handbook") == 0
    assert cached("tenant-b", 200) == 0


@pytest.mark.parametrize("model", [MODEL, f"{MODEL}_sync"])
def test_who_is_no_admin_is_refused(tell: Tell, capsys: Capture, model: str) -> None:
    assert tell("list", who="tenant-a", model=model) == 1
    assert "access denied" in capsys.readouterr().err


def test_the_facade_hands_commands_on(tell: Tell, capsys: Capture) -> None:
    assert tell("list", model=f"{MODEL}_sync") == 0
    assert "0 public" in capsys.readouterr().out
