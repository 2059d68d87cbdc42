"""deploy, rollback, releases and verify --running, as a user types them, against a stand-in server."""

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from engines import current_digest, generate_signing_key, list_releases, sign_release
from engines.manifest import encode_manifest, parse_manifest
from engines.trust import TrustSettings
from scripts import switching
from scripts.backend_layout import write_node_config
from scripts.cli import main
from tests.free_ports import free_ports
from tests.scripts.standin_server import StandInServer, standin_server

Capture = pytest.CaptureFixture[str]


@dataclass(frozen=True)
class Home:
    """A serving home without a backend, and releases of "small" that it may get."""

    root: Path
    releases: Path
    private: Path
    trust: TrustSettings
    nobody: str

    @property
    def version(self) -> Path:
        return self.root / "model_repository" / "small" / "1"

    def words(self, server: StandInServer | None) -> list[str]:
        at = ["--url", self.nobody] if server is None else server.words
        return ["--home", str(self.root), *at]

    def deploy(self, number: int, server: StandInServer | None = None, *more: str) -> int:
        release = self.releases / str(number)
        return main(["deploy", "small", str(release), *self.words(server), *more])

    def rollback(self, server: StandInServer | None = None, *more: str) -> int:
        return main(["rollback", "small", *self.words(server), *more])

    def digest(self, number: int) -> str:
        (found,) = [
            one.digest
            for one in list_releases(self.version, model="small", trust=self.trust)
            if one.release == number
        ]
        return found


MakeHome = Callable[[str], Home]


@pytest.fixture(scope="module")
def material(small_release: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Releases 1 … 5 in folders of these names, and the key pair that signed them."""
    folder = tmp_path_factory.mktemp("material")
    private, public = generate_signing_key(folder / "keys")
    manifest = parse_manifest((small_release / "engine.json").read_bytes())
    for number in range(1, 6):
        release = folder / str(number)
        shutil.copytree(small_release, release)
        changed = msgspec.structs.replace(manifest, release=number)
        (release / "engine.json").write_bytes(encode_manifest(changed))
        sign_release(release, private)
    return folder, private, public


@pytest.fixture
def make_home(material: tuple[Path, Path, Path], tmp_path: Path) -> MakeHome:
    folder, private, public = material

    def make(name: str) -> Home:
        root = tmp_path / name
        (root / "model_repository").mkdir(parents=True)
        write_node_config(root / "tensorcache.toml", keys=(public,))
        return Home(root, folder, private, TrustSettings(keys=(public,)), f"127.0.0.1:{free_ports(1)[0]}")

    return make


@pytest.fixture
def home(make_home: MakeHome) -> Home:
    return make_home("home")


@pytest.fixture
def server() -> Iterator[StandInServer]:
    with standin_server() as made:
        yield made


@pytest.fixture
def following(home: Home, server: StandInServer) -> StandInServer:
    """A server that takes up what is current when it was asked twice about it."""
    turns = iter(range(10_000))

    def follow() -> None:
        if next(turns) % 2:
            server.release = current_digest(home.version)[:16]

    server.on_ask = follow
    return server


def test_deploy_and_rollback_say_what_happened_and_what_serves(
    home: Home, following: StandInServer, capsys: Capture
) -> None:
    assert home.deploy(1) == 0
    out = capsys.readouterr().out
    first = home.digest(1)[:16]
    assert f"current      release 1 ({first}) in {home.version}\nbefore       nothing\n" in out
    assert f"serves now   nothing at {home.nobody} (no server answers): the next load takes it\n" in out
    following.release = first
    assert home.deploy(2, following) == 0
    out = capsys.readouterr().out
    second = home.digest(2)[:16]
    assert f"current      release 2 ({second}) in {home.version}\nbefore       {first}\n" in out
    assert re.search(rf"serves now   {second} at 127\.0\.0\.1:\d+", out)
    assert home.rollback(following) == 0
    out = capsys.readouterr().out
    assert f"current      release 1 ({first}) in {home.version}\nbefore       {second}\n" in out
    assert re.search(rf"serves now   {first} at 127\.0\.0\.1:\d+", out)
    assert home.deploy(1, following) == 0
    assert f"current      release 1 ({first}) in {home.version}, as before\n" in capsys.readouterr().out
    assert all(asked["triton_probe"] for asked in following.asked)
    assert all(5e6 < asked["timeout"] < 10e6 for asked in following.asked), (
        "it ends when nobody waits any more"
    )


def test_a_refusal_by_the_server_is_told_with_the_line_of_its_log(
    home: Home, server: StandInServer, capsys: Capture
) -> None:
    home.deploy(1)
    first = server.release = home.digest(1)[:16]
    server.refusals = {"memory": 3, "drain": 1}

    def refuse() -> None:
        server.refusals = {"memory": 3, "drain": 2, "golden": 1}

    server.on_ask = refuse
    assert home.deploy(2, server) == 1
    second = home.digest(2)[:16]
    url = server.words[1]
    refused = f"tensorcache: the server at {url} refused {second}: "
    assert capsys.readouterr().err == f"{refused}check 'golden' (its log has the line); serves: {first}\n"
    assert current_digest(home.version).startswith(second)
    assert home.rollback() == 0
    log = home.root / "triton.log"
    log.write_text(f"W swap to {second} refused, {first} serves: memory: of yesterday\n")

    def refuse_aloud() -> None:
        refuse()
        with log.open("a") as file:
            file.write(f"W swap to {'0' * 16} refused, {first} serves: digest: another's\n")
            file.write(f"W swap to {second} refused, {first} serves: golden: expected 7, found 8\n")

    server.refusals, server.on_ask = {}, refuse_aloud
    assert home.deploy(2, server) == 1
    assert f"{refused}golden: expected 7, found 8; serves: {first}" in capsys.readouterr().err


def test_a_swap_that_was_put_off_is_no_refusal(home: Home, server: StandInServer, capsys: Capture) -> None:
    home.deploy(1)
    server.release = home.digest(1)[:16]
    asked = iter(range(100))

    def put_off() -> None:
        server.refusals = {"drain": 1}
        if next(asked) > 2:
            server.release = current_digest(home.version)[:16]

    server.on_ask = put_off
    assert home.deploy(2, server) == 0
    assert f"serves now   {home.digest(2)[:16]} at" in capsys.readouterr().out


def test_who_waits_for_a_swap_that_is_put_off_is_told_why(
    home: Home, server: StandInServer, capsys: Capture
) -> None:
    home.deploy(1)
    first = server.release = home.digest(1)[:16]

    def put_off() -> None:
        line = f"W backend.swapper: swap to {current_digest(home.version)[:16]} refused, {first} serves: "
        (home.root / "triton.log").write_text(f"{line}drain: 1 requests still run after 6 s\n")

    server.on_ask = put_off
    assert home.deploy(2, server, "--wait", "0.5") == 1
    said = "put off and tried again: drain: 1 requests still run after 6 s"
    assert said in capsys.readouterr().err


def test_a_server_that_is_late_fails_only_who_asked_to_wait(
    home: Home, server: StandInServer, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(switching, "DEFAULT_WAIT_S", 0.01)
    home.deploy(1)
    first = server.release = home.digest(1)[:16]
    assert home.deploy(2, server) == 0
    second = home.digest(2)[:16]
    assert re.search(rf"serves now   {first} at .*; not {second} yet\n", capsys.readouterr().out)
    assert home.rollback(server) == 0
    assert home.rollback(server, "--wait", "0.01") == 1
    assert f"tensorcache: {second} does not serve: {first} at" in capsys.readouterr().err
    assert home.deploy(3, server, "--wait", "0") == 0
    assert f"not {home.digest(3)[:16]} yet" in capsys.readouterr().out
    assert home.deploy(4, None, "--wait", "0.01") == 1
    assert "does not serve: unknown (no server answers)" in capsys.readouterr().err


def test_the_refusal_of_what_somebody_else_made_current_is_not_ours(
    home: Home, server: StandInServer, capsys: Capture
) -> None:
    home.deploy(1)
    server.release = home.digest(1)[:16]
    asked = iter(range(100))

    def refuse_another_then_follow() -> None:
        server.refusals = {"golden": 1}
        with (home.root / "triton.log").open("a") as file:
            file.write(f"W swap to {'0' * 16} refused, nothing serves: golden: another's\n")
        if next(asked) > 3:
            server.release = current_digest(home.version)[:16]

    server.on_ask = refuse_another_then_follow
    assert home.deploy(2, server) == 0
    assert f"serves now   {home.digest(2)[:16]} at" in capsys.readouterr().out


def test_a_switch_by_somebody_else_ends_the_wait(home: Home, server: StandInServer, capsys: Capture) -> None:
    home.deploy(1)
    home.deploy(3)
    server.release = home.digest(3)[:16]

    def somebody() -> None:
        if current_digest(home.version) != home.digest(1):
            home.rollback(None, "--to", "1")

    server.on_ask = somebody
    assert home.deploy(2, server, "--wait", "60") == 1
    first = home.digest(1)[:16]
    assert f"; current names {first} meanwhile" in capsys.readouterr().err


def test_servers_that_will_not_follow_are_not_waited_for(
    home: Home, server: StandInServer, capsys: Capture
) -> None:
    server.release = "0123456789abcdef"
    assert home.deploy(1, server) == 0
    assert "which is no release of this repository: not waited for" in capsys.readouterr().out
    server.release, server.swap = home.digest(1)[:16], "off"
    assert home.deploy(2, server) == 0
    assert "its swap is off: load the model to change that" in capsys.readouterr().out
    server.loaded = False
    assert home.deploy(3, server) == 0
    assert "(small is not loaded there): the next load takes it" in capsys.readouterr().out


def test_the_home_says_whom_to_trust_and_how_old_a_release_may_be(home: Home, capsys: Capture) -> None:
    for number in (1, 2):
        assert home.deploy(number) == 0
    config = home.root / "tensorcache.toml"
    config.write_text(config.read_text() + "\n[trust.min_release]\nsmall = 2\n")
    capsys.readouterr()
    before = current_digest(home.version)
    assert home.rollback() == 1
    assert "min_release: expected release 2 or later of 'small', found 1" in capsys.readouterr().err
    assert current_digest(home.version) == before
    words = ["--model-repo", str(home.root / "model_repository"), "--url", home.nobody]
    assert main(["rollback", "small", *words]) == 2
    assert "no key to trust" in capsys.readouterr().err
    assert main(["rollback", "small", *words, "--config", str(config)]) == 1
    assert "min_release" in capsys.readouterr().err
    assert main(["rollback", "small", *words, "--key", str(home.trust.keys[0])]) == 0
    assert main(["rollback", "small", *words, "--config", str(config.with_name("none.toml"))]) == 1
    assert main(["rollback", "../small", *words, "--key", "k"]) == 2
    assert main(["rollback", "small", "--home", str(home.root / "nowhere")]) == 2
    assert "name a serving home with --home" in capsys.readouterr().err


def test_releases_are_a_table_of_whole_aligned_lines(
    home: Home, server: StandInServer, capsys: Capture
) -> None:
    for number in (1, 2, 3):
        home.deploy(number)
    home.rollback()
    server.release = home.digest(3)[:16]
    tokenizer = home.version / "releases" / home.digest(1) / "tokenizer.json"
    tokenizer.chmod(0o644)
    with tokenizer.open("ab") as file:
        file.write(b"\n")
    capsys.readouterr()
    assert main(["releases", "small", *home.words(server)]) == 0
    title, head, *rows, refused, serves = capsys.readouterr().out.splitlines()
    assert title == f"releases of small in {home.version}"
    columns = ("release", "digest", "runtime", "precision", "kv identity", "size", "published", "signature")
    at = [head.index(column) for column in columns]
    assert at == sorted(at)
    cells = [[row[start:end].strip() for start, end in zip(at, [*at[1:], None], strict=True)] for row in rows]
    assert [row[0] for row in cells] == ["3", "2", "1"]
    assert [row[1] for row in cells] == [home.digest(number)[:16] for number in (3, 2, 1)]
    assert {(row[2], row[3]) for row in cells} == {("onnxruntime", "int8")}
    assert [row[7] for row in cells] == ["verified", "verified", "refused: files"]
    assert "previous, serves" in rows[0]
    assert "current" in rows[1]
    assert "current" not in rows[2]
    assert re.fullmatch(rf"refused      {home.digest(1)[:16]} files: expected \d+ bytes .*", refused)
    assert serves == f"serves now   release 3 ({server.release}) at {server.words[1]}"


def test_pruning_never_removes_what_a_server_serves(
    home: Home, server: StandInServer, capsys: Capture
) -> None:
    for number in range(1, 6):
        home.deploy(number)
    server.release = home.digest(2)[:16]
    server.error = "queue is full"
    assert main(["releases", "small", "--prune", "1", *home.words(server)]) == 1
    assert "nothing removed" in capsys.readouterr().err
    server.error = ""
    gone = [home.digest(number)[:16] for number in (3, 1)]
    capsys.readouterr()
    assert main(["releases", "small", "--prune", "1", *home.words(server)]) == 0
    out = capsys.readouterr().out
    assert re.findall(r"removed      release (\d) \((\w+)\)", out) == list(zip("31", gone, strict=True))
    assert [one.release for one in list_releases(home.version, model="small", trust=home.trust)] == [5, 4, 2]
    assert main(["releases", "small", "--prune", "3", *home.words(server)]) == 0
    assert "removed      nothing" in capsys.readouterr().out


def test_verify_running_reads_the_folder_of_what_serves(
    home: Home, server: StandInServer, capsys: Capture
) -> None:
    words = ["verify", "--running", "small", "--rate", "1000", *home.words(server)]
    home.deploy(1)
    home.deploy(2)
    digest = home.digest(1)
    server.release = digest[:16]  # not the current one
    capsys.readouterr()
    assert main(words) == 0
    out = capsys.readouterr().out
    assert f"digest       {digest}" in out
    assert out.count("as signed") == len(list((home.version / "releases" / digest).iterdir()))
    assert f"verified     every byte of {home.version / 'releases' / digest}" in out

    tokenizer = home.version / "releases" / digest / "tokenizer.json"
    data = bytearray(tokenizer.read_bytes())
    data[-1] ^= 1
    tokenizer.chmod(0o644)
    tokenizer.write_bytes(data)
    assert main(words) == 1
    said = capsys.readouterr()
    assert re.search(r"tokenizer\.json .*differs", said.out)
    assert f"release 1 ({digest[:16]}) is not as it was signed: tokenizer.json: expected SHA-256" in said.err

    tokenizer.unlink()
    assert main(words) == 1
    assert "folder: expected every file named by" in capsys.readouterr().err
    shutil.rmtree(tokenizer.parent)
    assert main(words) == 1
    assert f"serves {digest[:16]}: expected its folder in" in capsys.readouterr().err
    server.error = "stopped"
    assert main(words) == 1
    assert "does not tell which release it serves: stopped (400)" in capsys.readouterr().err
    assert main(["verify", "--running", "small", *home.words(None)]) == 1
    assert "no server answers" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["Modelle für 東京 [1] *?", "with\nline", "not \udcff UTF-8"])
def test_a_home_of_any_name(make_home: MakeHome, server: StandInServer, name: str, capsys: Capture) -> None:
    home = make_home(name)
    home.deploy(1)
    server.release = home.digest(1)[:16]
    assert home.deploy(2) == 0
    assert home.rollback(server) == 0
    assert main(["releases", "small", *home.words(server)]) == 0
    assert main(["verify", "--running", "small", *home.words(server)]) == 0
    assert "as signed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--url", "x"], "expected HOST:PORT, got 'x'"),
        (["--url", "a:0"], "expected HOST:PORT"),
        (["--url", "a:70000"], "expected HOST:PORT"),
        (["--wait", "-1"], "seconds from 0 to 86400"),
        (["--wait", "soon"], "expected seconds"),
        (["--wait", "nan"], "seconds from 0 to 86400"),
    ],
)
def test_words_that_make_no_sense(words: list[str], reason: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["rollback", "small", *words])
    assert reason in capsys.readouterr().err
