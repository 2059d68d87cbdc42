"""Keys of principals: a credential is `id.secret`, and a file keeps the SHA-256 of the secret alone.

The secret is 256 random bits, so that neither a slow hash nor a salt would make it harder to guess.
Invariant: no secret and no digest appears in a repr or an error text.
"""

import hashlib
import hmac
import re
import secrets as random_source
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from backend.access.reason import Reason
from backend.errors import AccessDenied, ConfigError

KEY_ID_RULE: Final = "1 to 63 characters of a-z, 0-9 and -"
SECRET_NBYTES: Final = 32
SECRET_CHARACTERS: Final = 43
_KEY_ID: Final = re.compile(r"[a-z0-9-]{1,63}")
_SECRET: Final = re.compile(rf"[A-Za-z0-9_-]{{{SECRET_CHARACTERS}}}")
_NO_DIGEST: Final = bytes(hashlib.sha256().digest_size)
"""No text is known that has this digest."""

Compare = Callable[[bytes, bytes], bool]


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """One key as an acl file holds it."""

    id: str
    digest: bytes = field(repr=False)
    """SHA-256 of the secret's text."""
    expires: datetime | None = None
    """With an offset; from then on it is refused. None: never."""

    @property
    def sha256(self) -> str:
        """The digest as the file spells it."""
        return self.digest.hex()

    def expired(self, now: float) -> bool:
        """`now`: seconds since the epoch."""
        return self.expires is not None and now >= self.expires.timestamp()


def is_key_id(text: str) -> bool:
    """True for what KEY_ID_RULE says."""
    return _KEY_ID.fullmatch(text) is not None


def new_key(
    key_id: str,
    *,
    expires: datetime | None = None,
    random_text: Callable[[int], str] = random_source.token_urlsafe,
) -> tuple[str, KeyEntry]:
    """A fresh credential, and what the file keeps of it. The credential is shown once and kept nowhere."""
    if not is_key_id(key_id):
        raise ConfigError(f"key id: must be {KEY_ID_RULE}, found {key_id[:80]!r}")
    if expires is not None and expires.tzinfo is None:
        raise ConfigError(f"key {key_id}: expires must have an offset, such as Z, found {expires}")
    secret = random_text(SECRET_NBYTES)
    return f"{key_id}.{secret}", KeyEntry(key_id, digest_of(secret), expires)


def split_credential(credential: str) -> tuple[str, str]:
    """Id and secret; AccessDenied for what has another form."""
    key_id, _, secret = credential.partition(".")
    if not is_key_id(key_id) or _SECRET.fullmatch(secret) is None:
        raise AccessDenied(Reason.MALFORMED)
    return key_id, secret


def digest_of(secret: str) -> bytes:
    """What a file holds of it."""
    return hashlib.sha256(secret.encode()).digest()


def is_secret_of(key: KeyEntry | None, secret: str, *, compare: Compare = hmac.compare_digest) -> bool:
    """Is it the secret of this key? None, an unknown id, costs the same work and is no."""
    return compare(digest_of(secret), key.digest if key is not None else _NO_DIGEST) and key is not None
