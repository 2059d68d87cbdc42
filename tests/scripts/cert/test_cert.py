"""`tensorcache cert`: what it makes, nodes take; what it shows, is so; what is there, stays."""

import stat
import tomllib
from pathlib import Path

import pytest

from backend.settings import read_node_settings
from cachemgr import ClusterSettings
from cachemgr.cluster.certificates import certificates_of
from cachemgr.joining import open_beyond
from cachemgr.ring import NodeSpec
from scripts.cli import main
from tests.cachemgr.cluster.certificates import Authority
from tests.free_ports import free_ports

Capture = pytest.CaptureFixture[str]


def cert(*words: object) -> int:
    return main(["cert", *map(str, words)])


def node(folder: Path, *more: str, name: str = "gpu-7") -> int:
    ca = folder / "ca"
    return cert("node", folder / name, "--ca", ca, "--cluster", "prod", "--node", name, *more)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """An authority `ca`, and a node `gpu-7`."""
    assert cert("ca", tmp_path / "ca", "--cluster", "prod") == 0
    assert node(tmp_path, "--host", "10.0.0.7", "--host", "gpu-7.example", "--host", "::1") == 0
    return tmp_path


def test_a_node_takes_what_is_printed(made: Path, capsys: Capture) -> None:
    assert node(made, "--host", "10.0.0.8", name="gpu-8") == 0
    printed = capsys.readouterr().out
    section = tomllib.loads(printed[printed.index("[cluster]") :])["cluster"]
    settings = ClusterSettings(
        listen="10.0.0.8:8005", members=(NodeSpec("gpu-8", "10.0.0.8:8005"),), **section
    )
    certificates = certificates_of(settings, cluster="prod", node="gpu-8")
    assert certificates is not None
    assert 364 < certificates.expires_s / 86_400 <= 365


def test_keys_are_the_owners_alone(made: Path, capsys: Capture) -> None:
    for key in ("ca/ca.key", "gpu-7/node.key"):
        assert stat.S_IMODE((made / key).stat().st_mode) == 0o600
        assert "PRIVATE KEY" in (made / key).read_text()
    assert "PRIVATE" not in capsys.readouterr().out


def test_nothing_is_overwritten(made: Path, capsys: Capture) -> None:
    before = {file: file.read_bytes() for file in made.rglob("*") if file.is_file()}
    assert cert("ca", made / "ca", "--cluster", "prod") == 2
    assert node(made) == 2
    assert "is there and stays" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in made.rglob("*") if file.is_file()} == before


def test_a_renewal_is_of_the_node_whose_key_it_is(made: Path, capsys: Capture) -> None:
    before = (made / "gpu-7/node.crt").read_bytes()
    ca = made / "ca"
    assert cert("node", made / "gpu-7", "--ca", ca, "--cluster", "prod", "--node", "gpu-8", "--renew") == 2
    assert "is of node 'gpu-7'" in capsys.readouterr().err
    assert (made / "gpu-7/node.crt").read_bytes() == before
    (made / "gpu-7/node.crt").unlink()
    assert node(made, "--renew") == 0, "a lost certificate is made again"


def test_a_renewal_keeps_the_key_and_what_is_trusted(made: Path) -> None:
    before = {name: (made / "gpu-7" / name).read_bytes() for name in ("node.key", "node.crt", "ca.crt")}
    (made / "gpu-7" / "ca.crt").write_bytes(2 * before["ca.crt"])
    assert node(made, "--renew", "--days", "30") == 0
    assert (made / "gpu-7" / "node.key").read_bytes() == before["node.key"]
    assert (made / "gpu-7" / "node.crt").read_bytes() != before["node.crt"]
    assert (made / "gpu-7" / "ca.crt").read_bytes() == 2 * before["ca.crt"]
    assert cert("show", made / "gpu-7" / "node.crt") == 0
    assert node(made, "--renew", name="gpu-9") == 2, "there is no key"


def test_a_renewal_by_whom_the_node_does_not_trust_is_refused(made: Path, capsys: Capture) -> None:
    assert cert("ca", made / "new", "--cluster", "prod") == 0
    node_of = ("node", made / "gpu-7", "--ca", made / "new", "--cluster", "prod", "--node", "gpu-7")
    before = (made / "gpu-7" / "node.crt").read_bytes()
    assert cert(*node_of, "--host", "127.0.0.1", "--renew") == 2
    assert "does not trust" in capsys.readouterr().err
    assert (made / "gpu-7" / "node.crt").read_bytes() == before
    trusted = made / "gpu-7" / "ca.crt"
    trusted.write_bytes(trusted.read_bytes() + (made / "new" / "ca.crt").read_bytes())
    assert cert(*node_of, "--host", "127.0.0.1", "--renew") == 0
    assert cert("show", made / "gpu-7" / "node.crt") == 0


def test_show_says_who_and_that_a_node_takes_it(made: Path, capsys: Capture) -> None:
    capsys.readouterr()
    assert cert("show", made / "gpu-7" / "node.crt") == 0
    said = capsys.readouterr().out
    for part in ("gpu-7 of cluster prod", "gpu-7.example, 10.0.0.7, ::1", "CN=prod", "a node takes it"):
        assert part in said, said
    assert cert("show", made / "ca" / "ca.crt") == 0
    assert "as an authority" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"days": (-2, -1)}, "has ended"),
        ({"days": (1, 2)}, "is not valid before"),
        ({"uris": []}, "must carry one tensorcache://"),
        ({"uris": ["tensorcache://a/b", "tensorcache://a/c"]}, "has 2"),
        ({"names": ["b.example"]}, "lacks the DNS name"),
        ({"self_signed": True}, "self-signed certificate"),
    ],
)
def test_show_says_what_is_wrong(
    tmp_path: Path, capsys: Capture, wrong: dict[str, object], says: str
) -> None:
    authority = Authority(tmp_path)
    made = authority.issue("n", **wrong)  # type: ignore[arg-type]
    assert cert("show", made.tls_cert, "--ca", authority.path) == 1
    assert says in capsys.readouterr().err


def test_show_says_that_the_key_is_another_ones_or_everyones(made: Path, capsys: Capture) -> None:
    node(made, name="gpu-8")
    file = made / "gpu-7" / "node.crt"
    assert cert("show", file, "--key", made / "gpu-8" / "node.key") == 1
    assert "KEY_VALUES_MISMATCH" in capsys.readouterr().err
    (made / "gpu-7" / "node.key").chmod(0o604)
    assert cert("show", file) == 1
    assert "must not be readable by everyone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--cluster", "staging", "--node", "n"], "is the authority of cluster 'prod', not 'staging'"),
        (["--cluster", "prod", "--node", "N 1"], "node: "),
        (["--cluster", "prod", "--node", "n", "--host", "10.0.0.7:80"], "without a port"),
        (["--cluster", "prod", "--node", "n", "--host", "*.example"], "--host"),
        (["--cluster", "prod", "--node", "n", "--host", "gpu-8.prod.tensorcache"], "not end in"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(
    made: Path, capsys: Capture, words: list[str], says: str
) -> None:
    assert cert("node", made / "n", "--ca", made / "ca", *words) == 2
    assert says in capsys.readouterr().err
    assert not (made / "n" / "node.key").exists()


def test_an_authority_needs_its_own_key(made: Path, tmp_path: Path, capsys: Capture) -> None:
    assert cert("ca", tmp_path / "other", "--cluster", "prod") == 0
    (made / "ca" / "ca.key").write_bytes((tmp_path / "other" / "ca.key").read_bytes())
    assert node(made, name="gpu-8") == 2
    assert "is not the key of" in capsys.readouterr().err


def test_people_ask_a_node_with_what_was_made(tmp_path: Path, capsys: Capture) -> None:
    """The whole way: two commands, a node that starts with their files, a third command that asks it."""
    assert cert("ca", tmp_path / "ca", "--cluster", "prod") == 0
    assert node(tmp_path, "--host", "127.0.0.1") == 0
    printed = capsys.readouterr().out
    (port,) = free_ports(1)
    config = tmp_path / "tensorcache.toml"
    config.write_text(
        f'[node]\ncluster = "prod"\nid = "gpu-7"\n[host]\nbytes = 0\ndirectory = "{tmp_path}"\n'
        f'{printed[printed.index("[cluster]") :]}listen = "127.0.0.1:{port}"\n'
        f'[[cluster.members]]\nid = "gpu-7"\naddress = "127.0.0.1:{port}"\n'
    )
    settings = read_node_settings(config)
    running = open_beyond(settings.cache, settings.cluster)
    try:
        assert main(["ring", "show", "--config", str(config)]) == 0
        assert "gpu-7" in capsys.readouterr().out
        assert main(["ring", "show", "--at", f"127.0.0.1:{port}", "--cluster", "prod", "--timeout", "5"]) == 1
        assert "--config" in capsys.readouterr().err
    finally:
        running.close()
