"""Certificates on disk: what is taken, what is refused and said, and what happens as they end."""

import datetime
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st

from cachemgr.cluster.certificates import Certificates, ForeignCertificate, dns_name, node_uri
from cachemgr.cluster.certificates.names import name_in_der
from cachemgr.errors import SettingsError
from cachemgr.ring import NodeId
from tests.cachemgr.cluster.certificates import CLUSTER, Authority, Paths, trusting
from tests.cachemgr.host import Clock

IDS = st.from_regex(r"[a-z0-9.-]{1,63}", fullmatch=True)
NODE = "n"


def taken(paths: Paths) -> Certificates:
    return Certificates(paths.files, cluster=CLUSTER, node=NODE)


@given(st.tuples(IDS, IDS), st.tuples(IDS, IDS))
def test_two_nodes_have_never_one_name(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert (one == other) == (dns_name(*one) == dns_name(*other)) == (node_uri(*one) == node_uri(*other))


@pytest.mark.parametrize(
    ("uris", "says"),
    [
        ([], "has 0"),
        (["spiffe://prod/n"], "has 0"),
        (["tensorcache://test/n", "tensorcache://test/n"], "has 2"),
        (["tensorcache://test/n", "TENSORCACHE://test/m"], "has 2"),
        (["tensorcache://test"], "must be tensorcache://<cluster>/<node>"),
        (["tensorcache://test/n/m"], "must be tensorcache://<cluster>/<node>"),
        (["tensorcache://test/N"], "must be tensorcache://<cluster>/<node>"),
        (["tensorcache://test/n?m"], "must be tensorcache://<cluster>/<node>"),
        (["tensorcache://test/n%00"], "must be tensorcache://<cluster>/<node>"),
    ],
)
def test_one_uri_says_who_it_is(tmp_path: Path, uris: list[str], says: str) -> None:
    authority = Authority(tmp_path)
    paths = authority.issue(NODE, uris=uris)
    with pytest.raises(SettingsError, match=says):
        taken(paths)
    with pytest.raises(ForeignCertificate, match=says):
        authority.certificates(NODE).node_of(Path(paths.tls_cert).read_bytes(), pem=True)


def test_other_uris_do_not_matter(tmp_path: Path) -> None:
    paths = Authority(tmp_path).issue(NODE, uris=["spiffe://x/y", node_uri(CLUSTER, NODE)])
    assert taken(paths).loaded.name == (CLUSTER, NODE)


def test_names_of_a_kind_that_nobody_reads_are_nobodys() -> None:
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    edi_party = bytes.fromhex("3006a50481027879")
    made = x509.CertificateBuilder(x509.Name([]), x509.Name([]), key.public_key(), 1, now, now)
    san = x509.UnrecognizedExtension(x509.SubjectAlternativeName.oid, edi_party)
    shown = made.add_extension(san, critical=False).sign(key, hashes.SHA256())
    with pytest.raises(ForeignCertificate, match="cannot be read"):
        name_in_der(shown.public_bytes(serialization.Encoding.DER))


@given(st.binary(max_size=200))
def test_what_is_no_certificate_is_nobodys(data: bytes) -> None:
    with pytest.raises(ForeignCertificate):
        name_in_der(data)


WRONG: dict[str, tuple[Callable[[Authority, Authority], Paths], str]] = {
    "another node": (lambda ours, theirs: ours.issue("m"), "tls_cert: must be the certificate of node 'n'"),
    "another cluster": (lambda ours, theirs: ours.issue(NODE, cluster="prod"), "of cluster 'test', and is"),
    "expired": (lambda ours, theirs: ours.issue(NODE, days=(-2, -1)), "certificate has expired"),
    "not yet valid": (lambda ours, theirs: ours.issue(NODE, days=(1, 2)), "certificate is not yet valid"),
    "another authority": (
        lambda ours, theirs: trusting(theirs.issue(NODE), ours, at=ours.folder / "one"),
        "unable to get local issuer certificate",
    ),
    "self-signed": (lambda ours, theirs: ours.issue(NODE, self_signed=True), "self-signed certificate"),
    "no name of ours": (lambda ours, theirs: ours.issue(NODE, names=["n.example"]), "Hostname mismatch"),
    "another one's key": (
        lambda ours, theirs: Paths(ours.issue(NODE).tls_cert, ours.issue(NODE).tls_key, str(ours.path)),
        "KEY_VALUES_MISMATCH",
    ),
    "a key for a certificate": (
        lambda ours, theirs: Paths(ours.issue(NODE).tls_key, ours.issue(NODE).tls_key, str(ours.path)),
        "tls_cert: must begin with a certificate",
    ),
    "no authority": (
        lambda ours, theirs: Paths(*_both(ours.issue(NODE)), str(ours.folder / "none.pem")),
        "tls_ca: must be a readable PEM file",
    ),
}


def _both(paths: Paths) -> tuple[str, str]:
    return paths.tls_cert, paths.tls_key


@pytest.mark.parametrize("what", WRONG)
def test_a_broken_change_keeps_what_is_in_force_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    make, says = WRONG[what]
    with pytest.raises(SettingsError, match=says):
        taken(make(ours, theirs))
    here = _placed(ours.issue(NODE), tmp_path)
    certificates = taken(here)
    before = certificates.loaded
    _placed(make(ours, theirs), tmp_path)
    for _ in range(3):
        certificates.look()
    assert certificates.loaded is before
    assert certificates.generation == 1
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "those read before stay in use" in caplog.text
    assert "PRIVATE KEY" not in caplog.text
    _placed(ours.issue(NODE), tmp_path)
    certificates.look()
    assert certificates.generation == 2


def test_files_that_change_one_by_one_are_taken_when_they_fit(tmp_path: Path) -> None:
    ours = Authority(tmp_path / "ours")
    certificates = taken(_placed(ours.issue(NODE), tmp_path))
    new = ours.issue(NODE)
    Path(new.tls_cert).replace(tmp_path / "here.crt")
    certificates.look()
    assert certificates.generation == 1
    Path(new.tls_key).replace(tmp_path / "here.key")
    certificates.look()
    assert certificates.generation == 2
    certificates.look()
    assert certificates.generation == 2, "nothing is new"


def test_links_are_followed(tmp_path: Path) -> None:
    """As secrets are mounted into containers: a link to a folder is replaced."""
    ours = Authority(tmp_path / "ours")
    for turn in ("1", "2"):
        (tmp_path / turn).mkdir()
        _placed(ours.issue(NODE), tmp_path / turn)
    (tmp_path / "now").symlink_to("1")
    here = tmp_path / "now"
    certificates = taken(Paths(str(here / "here.crt"), str(here / "here.key"), str(here / "here.ca")))
    (tmp_path / "next").symlink_to("2")
    (tmp_path / "next").replace(here)
    certificates.look()
    assert certificates.generation == 2


def test_a_key_that_everyone_may_read_is_refused(tmp_path: Path) -> None:
    paths = Authority(tmp_path).issue(NODE)
    Path(paths.tls_key).chmod(0o604)
    with pytest.raises(SettingsError, match=r"tls_key: must not be readable by everyone.*0604"):
        taken(paths)


def test_the_end_is_told_before_it_comes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    ours = Authority(tmp_path)
    paths = _placed(ours.issue(NODE, days=(-1, 20)), tmp_path)
    certificates = taken(paths)
    clock.now = certificates.loaded.ends - 8 * 86_400
    certificates._clock = clock
    certificates.look()
    assert certificates.expires_s == 8 * 86_400
    assert caplog.messages == []
    for left_s, lines in ((6.5 * 86_400, 1), (86_400, 1), (-1, 2), (-60, 2)):
        clock.now = certificates.loaded.ends - left_s
        certificates.look()
        assert len(caplog.messages) == lines
    assert "ends in 6.5 days" in caplog.messages[0]
    assert "has ended" in caplog.messages[1]


def test_no_key_in_what_is_shown_of_it(tmp_path: Path) -> None:
    certificates = taken(Authority(tmp_path).issue(NODE))
    assert "PRIVATE" not in repr(certificates.loaded)


def test_another_clusters_node_is_none_of_ours(tmp_path: Path) -> None:
    ours = Authority(tmp_path)
    other = Path(ours.issue(NODE, cluster="prod").tls_cert).read_bytes()
    certificates = ours.certificates("m")
    with pytest.raises(ForeignCertificate, match="of cluster 'prod', not 'test'"):
        certificates.node_of(other, pem=True)
    mine = Path(ours.issue(NODE).tls_cert).read_bytes()
    assert certificates.node_of(mine, pem=True) == NodeId(NODE)


def _placed(paths: Paths, folder: Path) -> Paths:
    """The same files under names that stay; one that is not there goes away there, too."""
    here = Paths(str(folder / "here.crt"), str(folder / "here.key"), str(folder / "here.ca"))
    for source, place in (
        (paths.tls_cert, here.tls_cert), (paths.tls_key, here.tls_key), (paths.tls_ca, here.tls_ca)
    ):  # fmt: skip
        if not Path(source).exists():
            Path(place).unlink(missing_ok=True)
            continue
        scratch = Path(f"{place}.new")
        scratch.write_bytes(Path(source).read_bytes())
        scratch.chmod(0o600)
        scratch.replace(place)
    return here
