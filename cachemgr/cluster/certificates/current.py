"""The certificates in force: looked at about once a second, and replaced by new ones that are sound.

A broken change keeps what was in force, and says once why. What is connected already is not cut off: who
holds a connection compares `generation` with the one that it was made under, and makes another in time.

Threads: the IO thread looks; every thread may read `loaded`, which is never changed, only replaced.
"""

import logging
import time
from collections.abc import Callable

from cachemgr.cluster.certificates.loading import (
    CertificateFiles,
    LoadedCertificates,
    Stamp,
    load_certificates,
)
from cachemgr.cluster.certificates.names import ForeignCertificate, name_in_der, name_in_pem
from cachemgr.cluster.settings import ClusterSettings
from cachemgr.errors import SettingsError
from cachemgr.ring import NodeId

log = logging.getLogger(__name__)

LOOK_S = 1.0
SOON_S = 7 * 86_400.0
"""How long before its end a certificate is warned of."""


class Certificates:
    """Of one node, or of a person who shows a node's."""

    def __init__(
        self,
        files: CertificateFiles,
        *,
        cluster: str,
        node: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """SettingsError if they are not sound now. `clock`: seconds since the epoch."""
        self.cluster = cluster
        self._files = files
        self._node = node
        self._clock = clock
        self._stamp = files.stamp()
        self.loaded: LoadedCertificates = load_certificates(files, cluster=cluster, node=node)
        self.generation = 1
        self._trouble = ""
        self._warned: tuple[int, bool] | None = None
        self._warn()

    @property
    def expires_s(self) -> float:
        """Seconds until the certificate of this node ends; negative once it has."""
        return self.loaded.ends - self._clock()

    def look(self) -> None:
        """Take what is new in the files, if it is sound."""
        try:
            self._take(self._files.stamp())
        except (SettingsError, OSError) as error:
            if str(error) != self._trouble:
                log.warning("certificates: %s; those read before stay in use", error)
            self._trouble = str(error)
        self._warn()

    def node_of(self, shown: bytes, *, pem: bool) -> NodeId:
        """The node of ours whose certificate the other side showed; ForeignCertificate if it is none."""
        name = name_in_pem(shown) if pem else name_in_der(shown)
        if name.cluster != self.cluster:
            raise ForeignCertificate(f"the certificate is of cluster {name.cluster!r}, not {self.cluster!r}")
        return name.node

    def _take(self, stamp: Stamp) -> None:
        if stamp == self._stamp:
            self._trouble = ""
            return
        self.loaded = load_certificates(self._files, cluster=self.cluster, node=self._node)
        self._stamp = stamp
        self.generation += 1
        self._trouble = ""
        log.info(
            "certificates: new ones of node %s are in use, for %.1f days",
            self.loaded.name.node, self.expires_s / 86_400,
        )  # fmt: skip

    def _warn(self) -> None:
        """Once when the end is near, and once when it has come."""
        left_s = self.expires_s
        said = (self.generation, left_s <= 0)
        if left_s > SOON_S or self._warned == said:
            return
        self._warned = said
        when = f"ends in {left_s / 86_400:.1f} days" if left_s > 0 else "has ended, and other nodes refuse it"
        log.warning("certificates: %s %s: make a new one (`tensorcache cert node`)", self._files.cert, when)


def certificates_of(
    settings: ClusterSettings, *, cluster: str, node: str | None = None
) -> Certificates | None:
    """Those that the settings name; None if they name none. SettingsError if they are not sound."""
    if not settings.tls_cert:
        return None
    files = CertificateFiles(settings.tls_cert, settings.tls_key, settings.tls_ca)
    return Certificates(files, cluster=cluster, node=node)
