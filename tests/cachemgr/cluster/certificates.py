"""Certificate authorities of made-up clusters: sound certificates, and every wrong kind."""

import datetime
import os
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from cachemgr.cluster.certificates import Certificates, dns_name, node_uri
from cachemgr.cluster.certificates.loading import CertificateFiles
from cachemgr.ring import NodeId

CLUSTER = "test"
_DAY = datetime.timedelta(days=1)
_PEM = serialization.Encoding.PEM


@dataclass(frozen=True)
class Paths:
    """Paths of PEM files, by the names of the settings."""

    tls_cert: str
    tls_key: str
    tls_ca: str

    @property
    def files(self) -> CertificateFiles:
        return CertificateFiles(self.tls_cert, self.tls_key, self.tls_ca)


class Authority:
    """Issues certificates for 127.0.0.1."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named("authority")  # as one that replaces another is called
        certificate = self._builder(self._name, self._key, days=(-1, 30)).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self.path = folder / f"{name}.pem"
        self.path.write_bytes(certificate.sign(self._key, hashes.SHA256()).public_bytes(_PEM))

    def issue(
        self,
        node: str,
        *,
        cluster: str = CLUSTER,
        uris: Sequence[str] | None = None,
        names: Sequence[str] | None = None,
        hosts: Sequence[str] = ("127.0.0.1",),
        days: tuple[float, float] = (-1, 30),
        as_files: str = "",
        self_signed: bool = False,
    ) -> Paths:
        """A certificate of `node`, or one that says otherwise; `as_files`: the name of its files."""
        key = ec.generate_private_key(ec.SECP256R1())
        alternatives = [
            *(x509.UniformResourceIdentifier(uri) for uri in uris or ()),
            *(x509.DNSName(name) for name in ([dns_name(cluster, node)] if names is None else names)),
            *(x509.IPAddress(ip_address(host)) for host in hosts),
        ]
        if uris is None:
            alternatives.append(x509.UniformResourceIdentifier(node_uri(cluster, node)))
        subject = _named(node)
        builder = self._builder(subject, key, days=days, issuer=subject if self_signed else None)
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        certificate = builder.sign(key if self_signed else self._key, hashes.SHA256())
        private = key.private_bytes(
            _PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        stem = self.folder / (as_files or f"{node}-{x509.random_serial_number():x}")
        _replace(stem.with_suffix(".crt"), certificate.public_bytes(_PEM))
        _replace(stem.with_suffix(".key"), private)
        return Paths(str(stem.with_suffix(".crt")), str(stem.with_suffix(".key")), str(self.path))

    def certificates(self, node: str, **how: object) -> Certificates:
        """Sound ones of `node`, as a node has them."""
        return Certificates(self.issue(node, **how).files, cluster=CLUSTER, node=NodeId(node))  # type: ignore[arg-type]

    def _builder(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        *,
        days: tuple[float, float],
        issuer: x509.Name | None = None,
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        signer = key if issuer else self._key
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer or self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + days[0] * _DAY)
            .not_valid_after(now + days[1] * _DAY)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
            )
        )


def make_certificates(folder: Path) -> Paths:
    """Sound ones of node "node", of an authority of their own."""
    return Authority(folder).issue("node")


def trusting(paths: Paths, *authorities: Authority, at: Path) -> Paths:
    """The same certificate, with other authorities in the file `at`."""
    _replace(at, b"".join(authority.path.read_bytes() for authority in authorities))
    return Paths(paths.tls_cert, paths.tls_key, str(at))


def _named(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _replace(path: Path, data: bytes) -> None:
    scratch = path.with_suffix(".new")
    scratch.write_bytes(data)
    scratch.chmod(0o600)
    os.replace(scratch, path)
