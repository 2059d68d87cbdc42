"""Makes the authority of a cluster and certificates of its nodes: ECDSA P-256, one file each.

Invariant: a key is written once, readable by its owner alone, and never replaced.
"""

import datetime
import os
import re
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from cachemgr.cluster.certificates import ForeignCertificate, dns_name, node_uri
from cachemgr.cluster.certificates.loading import CertificateFiles
from cachemgr.cluster.certificates.names import name_in_pem
from cachemgr.errors import CacheError
from cachemgr.settings import CacheSettings
from scripts.errors import UsageError
from scripts.whole_file import write_whole

CA_CERT, CA_KEY = "ca.crt", "ca.key"
NODE_CERT, NODE_KEY = "node.crt", "node.key"
_CLOCKS_DIFFER = datetime.timedelta(minutes=5)
_AUTHORITY = "TensorCache authority"
_HOST = re.compile(r"[A-Za-z0-9_.-]{1,253}")
_OURS = ".tensorcache"
_PEM = serialization.Encoding.PEM


@dataclass(frozen=True)
class Wanted:
    """Of which node a certificate shall be, and for how many days."""

    cluster: str
    node: str
    hosts: tuple[str, ...]
    days: int


def make_authority(folder: Path, *, cluster: str, days: int) -> tuple[Path, Path]:
    """Certificate and key; UsageError if there is one."""
    _check_names(cluster, "node")
    certificate, key_file = folder / CA_CERT, folder / CA_KEY
    _refuse_if_there(certificate, key_file)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, _AUTHORITY),
            x509.NameAttribute(NameOID.COMMON_NAME, cluster),
        ]
    )
    builder = _builder(name, name, key.public_key(), signer=key.public_key(), days=days)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    signed = builder.add_extension(_usage(signs_certificates=True), critical=True).sign(key, hashes.SHA256())
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _write_key(key_file, key)
    write_whole(certificate, signed.public_bytes(_PEM))
    return certificate, key_file


def make_node(folder: Path, authority: Path, wanted: Wanted, *, renew: bool) -> CertificateFiles:
    """Key, certificate and authority of a node in `folder`; `renew` leaves the key that is there."""
    _check_names(wanted.cluster, wanted.node)
    ca, ca_key = _authority(authority, wanted.cluster)
    cert_file, key_file, ca_file = folder / NODE_CERT, folder / NODE_KEY, folder / CA_CERT
    if renew:
        key = _read_key(key_file)
        _refuse_another_node(cert_file, wanted)
        _refuse_untrusted(ca, authority / CA_CERT, ca_file)
    else:
        _refuse_if_there(cert_file, key_file)
        key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, wanted.node)]),
        ca.subject,
        key.public_key(),
        signer=ca_key.public_key(),
        days=wanted.days,
        at_most=ca.not_valid_after_utc,
    )
    both_ways = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    signed = (
        builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(both_ways), critical=False)
        .add_extension(x509.SubjectAlternativeName(_names(wanted)), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not renew:
        _write_key(key_file, key)
        write_whole(ca_file, ca.public_bytes(_PEM))  # a renewal leaves it: it may trust two by now
    write_whole(cert_file, signed.public_bytes(_PEM))
    return CertificateFiles(str(cert_file.absolute()), str(key_file.absolute()), str(ca_file.absolute()))


def is_authority(certificate: x509.Certificate) -> bool:
    """Does it sign others?"""
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    *,
    signer: ec.EllipticCurvePublicKey,
    days: int,
    at_most: datetime.datetime | None = None,
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    try:
        ends = now + datetime.timedelta(days=days)
    except OverflowError:
        raise UsageError(f"--days: must end before the year 10000, got {days}") from None
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_DIFFER)
        .not_valid_after(min(ends, at_most) if at_most else ends)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer), critical=False)
    )


def _names(wanted: Wanted) -> list[x509.GeneralName]:
    names: list[x509.GeneralName] = [
        x509.UniformResourceIdentifier(node_uri(wanted.cluster, wanted.node)),
        x509.DNSName(dns_name(wanted.cluster, wanted.node)),
    ]
    for host in wanted.hosts:
        try:
            names.append(x509.IPAddress(ip_address(host.strip("[]"))))
        except ValueError:
            if not _HOST.fullmatch(host) or host.lower().endswith(_OURS):  # as another node's it is no host
                problem = f"must be a name or address, without a port, and not end in {_OURS}"
                raise UsageError(f"--host: {problem}, got {host!r}") from None
            names.append(x509.DNSName(host))
    return names


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, key_cert_sign=signs_certificates,
        crl_sign=signs_certificates, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _authority(folder: Path, cluster: str) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    file = folder / CA_CERT
    try:
        certificate = x509.load_pem_x509_certificate(file.read_bytes())
    except (OSError, ValueError):
        raise UsageError(f"--ca: {file} must be a certificate: make it with `tensorcache cert ca`") from None
    named = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if not named or named[0].value != cluster:
        other = named[0].value if named else "nobody"
        raise UsageError(f"--ca: {file} is the authority of cluster {other!r}, not {cluster!r}")
    if certificate.not_valid_after_utc <= datetime.datetime.now(datetime.UTC):
        raise UsageError(f"--ca: {file} has ended: make another one with `tensorcache cert ca`")
    key = _read_key(folder / CA_KEY)
    if key.public_key() != certificate.public_key():
        raise UsageError(f"--ca: {folder / CA_KEY} is not the key of {file}")
    return certificate, key


def _read_key(file: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(file.read_bytes(), password=None)
    except OSError as error:
        raise UsageError(f"{file}: must be a readable key ({error.strerror})") from None
    except (ValueError, TypeError):  # garbage, or encrypted
        raise UsageError(f"{file}: must be an EC key in PEM, not encrypted") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UsageError(f"{file}: must be an EC key in PEM, not encrypted")
    return key


def _write_key(file: Path, key: ec.EllipticCurvePrivateKey) -> None:
    """FileExistsError if there is one meanwhile."""
    data = key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "wb") as out:
        out.write(data)
        out.flush()
        os.fsync(handle)


def _refuse_untrusted(ca: x509.Certificate, authority: Path, trusted: Path) -> None:
    """A node must trust who signed its own certificate; a renewal does not change whom it trusts."""
    try:
        known = x509.load_pem_x509_certificates(trusted.read_bytes())
    except (OSError, ValueError):
        raise UsageError(f"{trusted}: must hold the certificates of who is trusted") from None
    if ca not in known:
        both = f"{trusted.parent / 'both.crt'}"
        problem = f"{trusted} does not trust {authority} yet"
        raise UsageError(
            f"--ca: {problem}: let every node trust both first (cat {trusted} {authority} > {both}; "
            f"mv {both} {trusted})"
        )


def _refuse_another_node(file: Path, wanted: Wanted) -> None:
    """A renewal of what is there; one that is gone, or nobody can read, is made anew."""
    try:
        found = name_in_pem(file.read_bytes())
    except (OSError, ForeignCertificate):
        return
    if found != (wanted.cluster, wanted.node):
        problem = f"is of node {found.node!r} of cluster {found.cluster!r}, and is renewed only as such"
        raise UsageError(f"{file} {problem}: another node wants a folder of its own")


def _refuse_if_there(*files: Path) -> None:
    for file in files:
        if os.path.lexists(file):
            raise UsageError(f"{file} is there and stays: name another folder, or --renew a certificate")


def _check_names(cluster: str, node: str) -> None:
    try:
        CacheSettings(cluster=cluster, node=node)
    except CacheError as error:
        raise UsageError(f"--{error}") from None
