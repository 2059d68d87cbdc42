"""Where Redis is, how long blocks live there, and how much of a node it may take."""

import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec

from cachemgr.errors import SettingsError
from cachemgr.redis_address import RedisAddress, without_secrets

_Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
_LONGEST_PASSWORD = 4096
_WHERE = "redis.password_file"
"""Read after the rest of the section was checked: who refuses it knows no section."""


class RedisTierSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [redis] of a node. Without `url` there is no such tier, and nothing of it is imported.

    url              redis:// or rediss://, with a user if it wants one (redis://tensorcache-writer@host:6379);
                     `?ssl_ca_certs=FILE&ssl_certfile=FILE&ssl_keyfile=FILE` for rediss://
    password_file    its first line is the password, which then need not stand in `url`; mode 0600
    cluster          it is a Redis Cluster; `url` names any of its nodes
    """

    url: str = ""
    password_file: str = ""
    cluster: bool = False
    ttl_s: Annotated[float, msgspec.Meta(ge=1, le=30 * 86_400)] = 3600.0
    """How long a block is kept after it was last read or offered."""
    admit_seen: Annotated[int, msgspec.Meta(ge=1, le=15)] = 2
    """How often a block must have been made or found here before it is kept there."""
    call_s: _Seconds = 1.0
    """How long one answer may take: to a question, to a batch that is written, or the next block of a run."""
    breaker_s: _Seconds = 5.0
    """How long a server that does not answer is left alone."""
    connections: Annotated[int, msgspec.Meta(ge=1, le=256)] = 4
    """To each server, for reading; one more writes."""
    queue_blocks: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 4096
    """Blocks that may wait to be kept; more are dropped and counted."""
    window_bytes: Annotated[int, msgspec.Meta(ge=1 << 16, le=1 << 30)] = 8 << 20
    """Asked for ahead of what has arrived; at least one block."""
    batch_bytes: Annotated[int, msgspec.Meta(ge=1 << 16, le=1 << 30)] = 4 << 20
    """Written before the answers are waited for; at least one block."""

    def __post_init__(self) -> None:
        if not self.url:
            for field in ("password_file", "cluster"):
                if getattr(self, field):
                    raise SettingsError("url", f"must be set where {field} is", self.url)
            return
        address = RedisAddress.parse(self.url, where="url")
        if self.password_file and address.password:
            raise SettingsError("password_file", "must be empty where url has a password", self.password_file)
        if self.cluster and address.database:
            raise SettingsError("url", "must name database 0: a cluster has no other", address.database)

    def __repr__(self) -> str:
        """Without the password that `url` may have."""
        shown = msgspec.structs.asdict(self) | {"url": without_secrets(self.url)}
        return f"RedisTierSettings({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @property
    def enabled(self) -> bool:
        """True if there is such a tier."""
        return bool(self.url)

    def address(self) -> RedisAddress:
        """`url`, with the password of `password_file`, which is read now; SettingsError if it may not be."""
        address = RedisAddress.parse(self.url, where="url")
        return replace(address, password=_password(self.password_file)) if self.password_file else address


def _password(path: str) -> str:
    """SettingsError names the file and what is wrong with it, never what is in it."""
    try:
        fd = os.open(Path(path).expanduser(), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_uid not in (os.geteuid(), 0):
                raise SettingsError(_WHERE, "must be a regular file of this user", path)
            if info.st_mode & 0o077:
                mode = f"{stat.S_IMODE(info.st_mode):04o}"
                raise SettingsError(_WHERE, f"{path} must not be open to others (mode 0600)", mode)
            first = file.read(_LONGEST_PASSWORD + 1).split(b"\n", 1)[0].rstrip(b"\r")
    except OSError as error:
        raise SettingsError(_WHERE, f"cannot be read ({error.strerror})", path) from None
    try:
        password = first.decode()
    except UnicodeDecodeError:
        password = ""
    if not password or len(first) > _LONGEST_PASSWORD:
        raise SettingsError(_WHERE, f"must begin with 1 to {_LONGEST_PASSWORD} bytes of text", path)
    return password
