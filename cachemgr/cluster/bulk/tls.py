"""TLS between nodes: both sides show a certificate of the cluster's own CA.

Version 1.3 alone: nothing is renegotiated, so that sending never has to wait for receiving.
"""

import ssl


def server_context(cert: str, key: str, ca: str) -> ssl.SSLContext:
    """TLS 1.3 for the server's side: PEM files; clients show a certificate of the same CA."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    return _completed(context, cert, key, ca)


def client_context(cert: str, key: str, ca: str) -> ssl.SSLContext:
    """TLS 1.3 for the client's side: PEM files; the server's certificate must be of this CA and name its
    host.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return _completed(context, cert, key, ca)


def _completed(context: ssl.SSLContext, cert: str, key: str, ca: str) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(cert, key)
    context.load_verify_locations(ca)
    return context
