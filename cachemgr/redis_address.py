"""Where a Redis is and as whom to speak to it, from a URL that is not to be shown: it may have a password."""

from dataclasses import dataclass, field
from typing import Self
from urllib.parse import parse_qs, unquote, urlsplit

from cachemgr.errors import SettingsError

_TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_SCHEMES = ("redis", "rediss")


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """Where Redis is and as whom to speak to it. Its text and repr carry no password."""

    host: str
    port: int = 6379
    database: int = 0
    username: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    tls: bool = False
    tls_files: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, url: str, *, where: str = "redis") -> Self:
        """Of `redis[s]://[user[:password]@]host[:port][/database]`; SettingsError names `where`.

        rediss:// checks the server's certificate and name, against the system's authorities or those of
        `?ssl_ca_certs=FILE`; `ssl_certfile` and `ssl_keyfile` are our own.
        """
        try:
            parts = urlsplit(url)
            port, host = parts.port or 6379, parts.hostname or ""
        except ValueError:
            raise SettingsError(where, "must have a port up to 65535", without_secrets(url)) from None
        database = parts.path.strip("/") or "0"
        options = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        if parts.scheme not in _SCHEMES or not host or parts.fragment:
            problem = "must be redis://host:port or rediss://host:port (in a password, # is %23, / is %2F)"
        elif not database.isdecimal() or len(database) > 4:
            problem = "must end in nothing or the number of a database"
        elif set(options) - set(_TLS_FILES) or (options and parts.scheme != "rediss"):
            problem = f"takes no options but, for rediss://, {', '.join(_TLS_FILES)}"
        else:
            return cls(
                host, port, int(database), unquote(parts.username or ""), unquote(parts.password or ""),
                parts.scheme == "rediss", options,
            )  # fmt: skip
        raise SettingsError(where, problem, without_secrets(url))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def without_secrets(url: str) -> str:
    """The part of an address that may be shown, however wrong it is: no user, no password, no options."""
    hidden, at, host = url.rpartition("@")
    scheme, found, _ = hidden.partition("://")
    if not at:
        return url.split("?")[0]
    return f"{f'{scheme}://' if found and scheme in _SCHEMES else ''}…@{host.split('?')[0]}"
