"""How a node takes part in a cluster, checked field by field before any socket is opened."""

import re
from ipaddress import ip_address
from typing import Annotated

import msgspec

from cachemgr.errors import SettingsError
from cachemgr.redis_address import RedisAddress, without_secrets
from cachemgr.ring import NodeSpec

_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]{1,253}):([0-9]{1,5})")
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
_Rate = Annotated[float, msgspec.Meta(gt=0, le=1_000_000_000)]


class ClusterSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [cluster] of a node. Without `listen` the node is alone, and nothing of this is imported.

    listen               host:port of the control service; bulk connections get a port of their own beside it
    advertise            what other nodes dial, if that is not `listen`
    domain               failure domain; default: the node's id
    members              the static list that seeds epoch 1; empty with `redis`
    redis                redis:// or rediss:// address of the membership store
    replicas             copies beside the primary, for epoch 1; later `tensorcache ring replicas`
    state_dir            where ring.json is kept
    same_host            read peers of this host through their arenas; off: over TCP like everyone else
    tls_cert, tls_key, tls_ca    PEM files (`tensorcache cert`); needed off loopback, used on it, too;
                         new ones are taken while the node runs
    bulk_plaintext       shard bytes, and the tickets that open their connections, cross networks in the clear
    """

    listen: str = ""
    advertise: str = ""
    domain: str = ""
    weight: Annotated[float, msgspec.Meta(ge=0.001, le=1000)] = 1.0
    members: tuple[NodeSpec, ...] = ()
    redis: str = ""
    replicas: Annotated[int, msgspec.Meta(ge=0, le=3)] = 1
    state_dir: Annotated[str, msgspec.Meta(min_length=1)] = "cluster"
    same_host: bool = True
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    bulk_plaintext: bool = False
    lookup_s: _Seconds = 0.05
    """What an owner has to begin its answer; then the fetch goes on within the request's budget."""
    call_s: _Seconds = 2.0
    """Deadline of every other call to a peer."""
    lease_s: _Seconds = 5.0
    """How long a transfer may go without progress before its blocks are unpinned."""
    breaker_s: _Seconds = 5.0
    previous_s: _Seconds = 600.0
    """How long readers still ask the owners of the ring before."""
    down_s: _Seconds = 600.0
    """How long a node is down before its blocks are copied to the next owners."""
    copy_bytes_per_s: Annotated[int, msgspec.Meta(ge=1 << 20)] = 256 << 20
    """Bound of re-replication and of moves, each."""
    queue_blocks: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 4096
    """Committed blocks that may wait for replication; more are dropped and counted."""
    hot_reads_per_s: _Rate = 5000.0
    hot_window_s: _Seconds = 5.0
    balance: bool = False
    """Move a vnode away that takes more than 80 % of its node's bandwidth for 30 s."""

    def __post_init__(self) -> None:
        for field in ("listen", "advertise"):
            value = getattr(self, field)
            if value:
                split_address(value, field=field)
        if self.redis:
            RedisAddress.parse(self.redis)
        if self.redis and self.members:
            problem = "must be empty when redis is set: the ring is kept there"
            raise SettingsError("members", problem, len(self.members))
        if self.listen and not (self.redis or self.members):
            raise SettingsError("members", "must list the nodes of the cluster, unless redis is set", ())
        if len({member.id for member in self.members}) < len(self.members):
            names = [member.id for member in self.members]
            raise SettingsError("members", "must name every node once", names)
        addresses = [member.address for member in self.members]
        if len(set(addresses)) < len(addresses):  # two copies of a block would be one
            raise SettingsError("members", "must give every node an address of its own", addresses)
        tls = (self.tls_cert, self.tls_key, self.tls_ca)
        if any(tls) and not all(tls):
            raise SettingsError("tls_cert, tls_key, tls_ca", "must be set all together or not at all", tls)
        for field in ("listen", "advertise"):
            address = getattr(self, field)
            if self.listen and address and not all(tls) and not is_loopback(address):
                problem = "must be a loopback address unless tls_cert, tls_key and tls_ca are set"
                raise SettingsError(field, problem, address)

    def __repr__(self) -> str:
        """Without the password that `redis` may have."""
        shown = msgspec.structs.asdict(self) | {"redis": without_secrets(self.redis)}
        return f"ClusterSettings({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @property
    def enabled(self) -> bool:
        """True if this node is one of a cluster."""
        return bool(self.listen)

    @property
    def address(self) -> str:
        """What other nodes dial."""
        return self.advertise or self.listen


def split_address(text: str, *, field: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[v6]:port`; SettingsError names `field`."""
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 <= int(match[2]) <= 65535:
        raise SettingsError(field, "must be host:port with a port up to 65535", text)
    return match[1].strip("[]"), int(match[2])


def is_loopback(address: str) -> bool:
    """True if `host:port` can only be reached from this host; other names than localhost do not count."""
    host, _ = split_address(address, field="address")
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
