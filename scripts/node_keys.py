"""The two keys of a node's own command: Triton's admin key, and the credential of its liveness probe.

The admin key is made once per serving home. The probe's credential is derived from the node's secrets: who
may read those may probe, and nobody has to hand out or rotate a key for it.

Invariant: neither is in a repr, a log line or an error text.
"""

import os
import re
import secrets
import shlex
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from scripts.errors import RejectedError
from scripts.whole_file import write_whole

ADMIN_KEY_FILE: Final = "admin.key"
_ADMIN_KEY_NBYTES: Final = 32
_ADMIN_KEY: Final = re.compile(f"[0-9a-f]{{{2 * _ADMIN_KEY_NBYTES}}}\n?")


@dataclass(frozen=True, slots=True)
class ProbeKey:
    """What a probe shows. `credential` None: it has nothing to show, and `missing` says why."""

    credential: str | None = field(default=None, repr=False)
    missing: str = ""

    @property
    def hint(self) -> str:
        """What to do about a server that refused a probe with this key."""
        if self.credential is None:
            return f"access is controlled there, and this probe had no credential: {self.missing}"
        return (
            "access is controlled there, and these secrets do not admit a probe: name the tensorcache.toml "
            "that the server was started with"
        )


def admin_key(file: Path) -> str:
    """The key of Triton's own doors, made if there is none: 256 random bits; who has it may load models."""
    if not os.path.lexists(file):
        write_whole(file, f"{secrets.token_hex(_ADMIN_KEY_NBYTES)}\n".encode(), mode=0o600)
    text = _private_text(file)
    if _ADMIN_KEY.fullmatch(text) is None:
        raise RejectedError(
            f"{file}: expected {_ADMIN_KEY_NBYTES} bytes in hex, found {len(text)} characters of something "
            "else: delete it, the next start makes a new one"
        )
    return text.strip()


def probe_key(config: Path) -> ProbeKey:
    """The credential of the node that has `config`, a tensorcache.toml. Never raises: a probe goes on."""
    if not config.is_file():  # before anything large is imported
        return ProbeKey(missing=f"{config} is not there: name a serving home with --home")
    try:
        from backend.access import probe_credential
        from backend.errors import ConfigError
        from backend.settings import read_node_settings
        from cachemgr import CacheSecrets, SecretsError, probe_secret
    except ImportError as error:  # a probe works with the standard library alone
        return ProbeKey(missing=f"{config} cannot be read here: {error}")
    try:
        where = read_node_settings(config).secrets
        loaded = CacheSecrets.load(where.dir, group=where.group, grace_s=where.grace_s)
    except (ConfigError, SecretsError) as error:
        return ProbeKey(missing=str(error))
    return ProbeKey(probe_credential(probe_secret(loaded)))


def _private_text(file: Path) -> str:
    """What is in a file that nobody else can have read or written; RejectedError if somebody could."""
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:  # a link among them: its text would be "too many levels of symbolic links"
        problem = "a symbolic link" if file.is_symlink() else error.strerror
        raise RejectedError(f"{file}: expected a readable file of this user, found: {problem}") from None
    with os.fdopen(handle, "rb") as source:
        info = os.fstat(handle)
        if not stat.S_ISREG(info.st_mode) or info.st_uid not in (os.geteuid(), 0):
            raise RejectedError(f"{file}: expected a regular file of this user: delete it")
        mode = stat.S_IMODE(info.st_mode)
        if mode & 0o077:
            raise RejectedError(
                f"{file}: expected mode 0600, found {mode:04o}; others may have read it: delete it, the next "
                f"start makes a new one (`rm {shlex.quote(str(file))}`)"
            )
        return source.read(2 * _ADMIN_KEY_NBYTES + 2).decode("ascii", "replace")
