"""Opens a bulk connection: through the door that the control service named, with its ticket.

Invariants
- A ticket crosses a network only inside TLS, unless the settings allow plaintext; the peer's word does not
  count for that. With certificates there is no connection without TLS, on loopback neither.
- Who answers must be the node that was meant: inside TLS its certificate says so, before it sees the ticket.
- Nobody between the two can talk them down to an older wire version: inside TLS nobody changes the Hello.

Threads: the IO thread.
"""

from dataclasses import dataclass

from cachemgr.cluster.bulk.frames import MalformedFrame, PeerTrouble
from cachemgr.cluster.bulk.hello import (
    NO_VERSION,
    REASONS,
    WELCOME_NBYTES,
    Hello,
    pack_hello,
    parse_welcome,
)
from cachemgr.cluster.bulk.streams import Stream, connect, fill, send_all
from cachemgr.cluster.certificates import Certificates, ForeignCertificate, dns_name
from cachemgr.cluster.settings import is_loopback
from cachemgr.errors import SettingsError
from cachemgr.ring import NodeId


@dataclass(frozen=True, slots=True)
class BulkDoor:
    """What a control `Open` call answers: where the bulk channel is, and what opens it, once, within 5 s."""

    host: str
    port: int
    ticket: bytes
    same_host: bool
    """The peer lets its arenas be read by who can open them."""
    tls: bool


async def open_stream(
    door: BulkDoor, *, node: NodeId, hello: Hello, certificates: Certificates | None, plaintext: bool
) -> tuple[Stream, int]:
    """A stream that `node` has let us in by, and the wire version spoken on it. PeerTrouble or OSError if
    not.

    `plaintext`: the settings allow it off loopback. The caller has a deadline.
    """
    try:
        loopback = is_loopback(_address(door))
    except SettingsError as error:
        raise PeerTrouble("malformed", f"the door's {error}") from None
    if not door.tls and not (plaintext or (loopback and certificates is None)):
        raise PeerTrouble("plaintext", f"{door.host} offers no TLS, and bulk_plaintext is off")
    if not door.tls:
        stream = await connect(door.host, door.port, tls=None)
    elif certificates is None:
        raise PeerTrouble("plaintext", f"{door.host} wants TLS, and no certificate is set")
    else:
        name, context = dns_name(certificates.cluster, node), certificates.loaded.client
        stream = await connect(door.host, door.port, tls=context, name=name)
    try:
        if certificates is not None and door.tls:
            _check_identity(stream, node, certificates)
        await send_all(stream, pack_hello(hello))
        answer = bytearray(WELCOME_NBYTES)
        await fill(stream, memoryview(answer))
        return stream, _judge(bytes(answer), node, hello.versions)
    except BaseException:
        stream.close()
        raise


def _check_identity(stream: Stream, node: NodeId, certificates: Certificates) -> None:
    try:
        found = certificates.node_of(stream.certificate, pem=False)
    except ForeignCertificate as error:
        raise PeerTrouble("refused", str(error)) from None
    if found != node:
        raise PeerTrouble("refused", f"expected the certificate of node {node}, found that of {found}")


def _judge(answer: bytes, node: NodeId, versions: tuple[int, int]) -> int:
    try:
        welcome = parse_welcome(answer)
    except MalformedFrame as error:
        raise PeerTrouble("malformed", str(error)) from None
    if welcome.node != node:
        raise PeerTrouble("refused", f"expected node {node}, found {welcome.node}")
    if welcome.reason in REASONS:
        detail = REASONS[welcome.reason]
        raise PeerTrouble("versions" if welcome.reason == NO_VERSION else "refused", detail)
    if not versions[0] <= welcome.version <= versions[1]:
        ours = f"{versions[0]} to {versions[1]}"
        raise PeerTrouble("versions", f"the peer chose {welcome.version}, we speak {ours}")
    return welcome.version


def _address(door: BulkDoor) -> str:
    return f"[{door.host}]:{door.port}" if ":" in door.host else f"{door.host}:{door.port}"
