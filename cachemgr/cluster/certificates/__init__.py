"""Who a node is, proven: certificates that carry its id, followed on disk while they are in use.

    names       the id of a node as its certificate carries it
    loading     three PEM files → what both channels need, or what is wrong with them
    current     those in force now; new ones take over without a restart

A certificate of a node carries the URI `tensorcache://<cluster>/<node>`, which the other side compares with
the node that it means, and a DNS name made of both, which gRPC compares, as it shows a client no certificate.
"""

from cachemgr.cluster.certificates.current import Certificates, certificates_of
from cachemgr.cluster.certificates.names import ForeignCertificate, NodeName, dns_name, node_uri

__all__ = ["Certificates", "ForeignCertificate", "NodeName", "certificates_of", "dns_name", "node_uri"]
