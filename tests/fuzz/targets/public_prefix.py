"""Files of public prefixes: PrefixError of one line, or a prefix that is written again equally."""

from datetime import UTC, datetime

import numpy as np

from backend.admin.prefix_file import (
    MAX_PREFIX_TOKENS,
    PrefixError,
    PublicPrefix,
    decode_prefix,
    encode_prefix,
)
from tests.fuzz.contract import plain

_PREFIX = PublicPrefix("system-1", np.arange(40), datetime(2026, 11, 30, tzinfo=UTC), "alice")
_FILE = encode_prefix("smollm2", _PREFIX)
EXAMPLES = (
    _FILE,
    _FILE.replace(b"system-1", b"\\u001b[31m"),
    _FILE.replace(b"[0,", b"[" * 20_000),
    _FILE.replace(b"[0,", b"[" + b"9" * 5000 + b","),
    _FILE.replace(b"[0,", b"[2147483648,"),
    _FILE.replace(b"2026-11-30T00:00:00Z", b"0001-01-01T00:00:00+23:59"),
    encode_prefix("other", _PREFIX),
)


def target(data: bytes) -> None:
    try:
        prefix = decode_prefix(data, "smollm2", "system-1")
    except PrefixError as error:
        plain(error)
        return
    assert prefix.name == "system-1"
    assert prefix.tokens.dtype == np.int64
    assert 1 <= len(prefix.tokens) <= MAX_PREFIX_TOKENS
    assert ((prefix.tokens >= 0) & (prefix.tokens < 2**31)).all()
    again = decode_prefix(encode_prefix("smollm2", prefix), "smollm2", "system-1")
    assert again.tokens.tolist() == prefix.tokens.tolist()
    assert (again.registered, again.by) == (prefix.registered, prefix.by)
