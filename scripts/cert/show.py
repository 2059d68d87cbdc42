"""Whose a certificate is, until when, and whether a node would take it."""

import datetime
from pathlib import Path

from cryptography import x509

from cachemgr.cluster.certificates import ForeignCertificate, dns_name
from cachemgr.cluster.certificates.loading import CertificateFiles, load_certificates
from cachemgr.cluster.certificates.names import name_in
from cachemgr.errors import SettingsError
from scripts.cert.issuing import CA_CERT, is_authority
from scripts.errors import UsageError


def shown(file: Path, *, key: Path | None, ca: Path | None) -> tuple[list[str], str]:
    """Lines for people, and what is wrong first ("" if nothing is)."""
    try:
        certificates = x509.load_pem_x509_certificates(file.read_bytes())
    except OSError as error:
        raise UsageError(f"{file}: cannot be read ({error.strerror})") from None
    except ValueError:
        raise UsageError(f"{file}: must hold certificates in PEM") from None
    lines, wrong = [], ""
    for certificate in certificates:
        said, trouble = _one(certificate)
        lines += said
        wrong = wrong or trouble
    if not wrong and not is_authority(certificates[0]):
        line, wrong = _checked(file, certificates[0], key=key, ca=ca)
        lines.append(line)
    if not wrong and is_authority(certificates[0]):
        lines.append("sound        as an authority: tls_ca of its nodes")
    return lines, wrong


def _one(certificate: x509.Certificate) -> tuple[list[str], str]:
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    now = datetime.datetime.now(datetime.UTC)
    left = (end - now).total_seconds() / 86_400
    valid = f"valid        {start:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC, {left:.1f} days left"
    subject, wrong = certificate.subject.rfc4514_string(), ""
    if is_authority(certificate):
        lines = [f"authority    {subject}", valid]
    else:
        try:
            name = name_in(certificate)
            lines = [
                f"node         {name.node} of cluster {name.cluster}",
                f"reached at   {_hosts(certificate)}",
            ]
            if dns_name(*name) not in _dns(certificate):
                wrong = f"lacks the DNS name {dns_name(*name)}, by which other nodes know it"
        except ForeignCertificate as error:
            lines, wrong = [f"subject      {subject}"], str(error)
        lines += [f"signed by    {certificate.issuer.rfc4514_string()}", valid]
    if not wrong and now >= end:
        wrong = f"has ended {-left:.1f} days ago: make a new one"
    elif not wrong and now < start:
        wrong = f"is not valid before {start:%Y-%m-%d %H:%M} UTC: look at this machine's clock"
    return lines, wrong


def _checked(
    file: Path, certificate: x509.Certificate, *, key: Path | None, ca: Path | None
) -> tuple[str, str]:
    """What a node would say that has these three files."""
    key, ca = key or file.with_suffix(".key"), ca or file.with_name(CA_CERT)
    missing = [str(one) for one in (key, ca) if not one.exists()]
    if missing:
        return f"sound        as far as it goes: {' and '.join(missing)} not there to check with", ""
    name = name_in(certificate)
    try:
        load_certificates(
            CertificateFiles(str(file), str(key), str(ca)), cluster=name.cluster, node=name.node
        )
    except SettingsError as error:
        return f"not sound    with {key} and {ca}", str(error)
    return f"sound        a node takes it, with {key} and {ca}", ""


def _hosts(certificate: x509.Certificate) -> str:
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    hosts = [name for name in _dns(certificate) if not name.endswith(".tensorcache")]
    hosts += [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    return ", ".join(hosts) or "no host: only nodes know it, `tensorcache ring --at` does not"


def _dns(certificate: x509.Certificate) -> list[str]:
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return names.get_values_for_type(x509.DNSName)
