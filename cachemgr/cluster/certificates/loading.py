"""Three PEM files → what both channels need; or which of them is wrong, and why.

A pair is taken only if it can talk to itself: one TLS handshake in memory, in which each side shows it to the
other. That finds a key that does not fit, an authority that did not sign it, wrong dates, wrong uses.

Invariant: what is loaded is of one moment; files that change meanwhile are an error. No key in any text.
"""

import os
import ssl
import stat
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509

from cachemgr.cluster.certificates.names import ForeignCertificate, NodeName, dns_name, name_in
from cachemgr.errors import SettingsError

_FLIGHTS = 6

Stamp = tuple[tuple[int, ...], ...]
"""Changes with any of the files."""


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """Paths of PEM files: the node's certificate (with intermediate ones), its key, the cluster's CAs."""

    cert: str
    key: str
    ca: str

    def stamp(self) -> Stamp:
        """SettingsError if one is not there."""
        return tuple(
            _stamped(path, name)
            for path, name in ((self.cert, "tls_cert"), (self.key, "tls_key"), (self.ca, "tls_ca"))
        )


@dataclass(frozen=True, slots=True)
class LoadedCertificates:
    """What was in the files. `ends`: when the node's certificate does, seconds since the epoch."""

    cert: bytes
    key: bytes = field(repr=False)
    ca: bytes
    name: NodeName
    ends: float
    server: ssl.SSLContext
    """TLS 1.3 for who is connected to."""
    client: ssl.SSLContext
    """TLS 1.3 for who connects."""


def load_certificates(files: CertificateFiles, *, cluster: str, node: str | None) -> LoadedCertificates:
    """SettingsError unless they are sound and of this node; `node` None: of any node of the cluster."""
    before = files.stamp()
    _check_key(files.key)
    cert, key, ca = _read(files.cert, "tls_cert"), _read(files.key, "tls_key"), _read(files.ca, "tls_ca")
    leaf = _leaf(cert, files.cert)
    name = _own_name(leaf, files.cert, cluster=cluster, node=node)
    try:
        server = _completed(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), files)
        server.num_tickets = 0  # nobody resumes what another certificate began
        client = _completed(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), files)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        problem = f"must be PEM files that belong together ({_reason(error)})"
        raise SettingsError("tls_cert, tls_key, tls_ca", problem, _paths(files)) from None
    _talk_to_itself(server, client, name, files)
    if files.stamp() != before:
        problem = "must not change while they are read: they are read again in a moment"
        raise SettingsError("tls_cert, tls_key, tls_ca", problem, _paths(files))
    return LoadedCertificates(
        cert, key, ca, name, leaf.not_valid_after_utc.timestamp(), server=server, client=client
    )


def _completed(context: ssl.SSLContext, files: CertificateFiles) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3  # no renegotiation: sending never waits for receiving
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(files.cert, files.key, password=_no_password)
    context.load_verify_locations(files.ca)
    return context


def _no_password() -> str:
    """Nobody is at a keyboard; gRPC could not read such a key either."""
    raise ValueError("the key is encrypted")


def _talk_to_itself(
    server: ssl.SSLContext, client: ssl.SSLContext, name: NodeName, files: CertificateFiles
) -> None:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server, server_hostname=dns_name(*name)),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for turn in range(_FLIGHTS):
        try:
            sides[turn % 2].do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLError as error:
            problem = f"must be what other nodes accept ({_reason(error)})"
            raise SettingsError("tls_cert, tls_key, tls_ca", problem, _paths(files)) from None
        if turn % 2:  # the server's side ends last: it has seen the client's certificate
            return
    raise AssertionError("a handshake in memory ends")


def _own_name(leaf: x509.Certificate, path: str, *, cluster: str, node: str | None) -> NodeName:
    try:
        name = name_in(leaf)
    except ForeignCertificate as error:
        problem = f"must be one that `tensorcache cert node` makes ({error})"
        raise SettingsError("tls_cert", problem, path) from None
    if name.cluster != cluster or node not in (None, name.node):
        wanted = f"node {node!r} of cluster {cluster!r}" if node else f"a node of cluster {cluster!r}"
        problem = f"must be the certificate of {wanted}, and is that of {name.node!r} of {name.cluster!r}"
        raise SettingsError("tls_cert", problem, path)
    return name


def _leaf(pem: bytes, path: str) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError:
        raise SettingsError("tls_cert", "must begin with a certificate in PEM", path) from None


def _check_key(path: str) -> None:
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode & 0o007:
        problem = f"must not be readable by everyone, and has mode {mode:04o}: run chmod 600"
        raise SettingsError("tls_key", problem, path)


def _stamped(path: str, name: str) -> tuple[int, ...]:
    try:
        found = os.stat(path)  # of what a link shows: the links are what is replaced
    except OSError as error:
        raise SettingsError(name, f"must be a readable PEM file ({error.strerror})", path) from None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_mode


def _read(path: str, name: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise SettingsError(name, f"must be a readable PEM file ({error.strerror})", path) from None


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return str(error.verify_message)
    if isinstance(error, ssl.SSLError):
        return str(error.reason or error)
    return str(error)


def _paths(files: CertificateFiles) -> tuple[str, str, str]:
    return files.cert, files.key, files.ca
