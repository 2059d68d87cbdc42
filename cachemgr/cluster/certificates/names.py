"""The id of a node as its certificate carries it: one URI, and a DNS name that says the same.

Invariant: two nodes never have the same name. Ids have no underscore, so that dots may become some.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from cryptography import x509

from cachemgr.errors import CacheError
from cachemgr.ring import NodeId

_SCHEME = "tensorcache://"
_URI = re.compile(re.escape(_SCHEME) + r"([a-z0-9.-]{1,63})/([a-z0-9.-]{1,63})")
_ZONE = "tensorcache"
_UNREADABLE = (ValueError, x509.DuplicateExtension, x509.InvalidVersion, x509.UnsupportedGeneralNameType)


class ForeignCertificate(CacheError):
    """It is whole, and not that of a node of ours."""


class NodeName(NamedTuple):
    """A node of a cluster."""

    cluster: str
    node: NodeId


def node_uri(cluster: str, node: str) -> str:
    """The URI that a certificate of this node has."""
    return f"{_SCHEME}{cluster}/{node}"


def dns_name(cluster: str, node: str) -> str:
    """The DNS name that a certificate of this node has; nobody ever looks it up."""
    return f"{node.replace('.', '_')}.{cluster.replace('.', '_')}.{_ZONE}"


def name_in(certificate: x509.Certificate) -> NodeName:
    """Whose it is; ForeignCertificate unless it carries exactly one URI of a node."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        raise ForeignCertificate("the certificate names no node") from None
    except _UNREADABLE as error:
        raise ForeignCertificate(f"the certificate cannot be read ({error})") from None
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    ours = [uri for uri in uris if uri.lower().startswith(_SCHEME)]
    if len(ours) != 1:
        raise ForeignCertificate(f"the certificate must carry one {_SCHEME}… URI, and has {len(ours)}")
    match = _URI.fullmatch(ours[0])
    if match is None:
        shown = repr(ours[0][:200])
        raise ForeignCertificate(f"the certificate's URI must be {_SCHEME}<cluster>/<node>, got {shown}")
    return NodeName(match[1], NodeId(match[2]))


@lru_cache(1024)
def name_in_pem(pem: bytes) -> NodeName:
    """As `name_in`, of what gRPC says that the other side showed."""
    return name_in(_parsed(x509.load_pem_x509_certificate, pem))


def name_in_der(der: bytes) -> NodeName:
    """As `name_in`, of what a socket says that the other side showed; b"" for nothing."""
    return name_in(_parsed(x509.load_der_x509_certificate, der))


def _parsed(load: Callable[[bytes], x509.Certificate], data: bytes) -> x509.Certificate:
    try:
        return load(data)
    except _UNREADABLE as error:
        raise ForeignCertificate(f"no certificate that can be read was shown ({error})") from None
