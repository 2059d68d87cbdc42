"""Files beside the releases: `current`, the history, and names that a person types or a folder has."""

import hashlib
from datetime import UTC, datetime

from engines.errors import ReleaseError
from engines.history import HISTORY, read_history
from engines.loading import current_digest, load_release
from engines.release_folder import ReleaseFolder
from engines.release_list import choose_release
from engines.trust import TrustSettings
from tests.fuzz.contract import plain, scratch
from tests.fuzz.source import Source

_DIGEST = hashlib.sha256(b"").hexdigest()
_LINE = f"2026-11-30T08:17:00Z {_DIGEST}\n".encode()
EXAMPLES = (
    b"\x00" + _DIGEST.encode() + b"\n",
    b"\x01" + _LINE + b"torn" + _LINE,
    b"\x02" + _DIGEST[:12].encode(),
    b"\x02" + b"9" * 30,
    b"\x03" + _DIGEST.encode(),
    b"\x03" + _DIGEST.encode() + b"\n",
    b"\x04" + b"model.onnx",
)


def target(data: bytes) -> None:
    source = Source(data)
    kind, rest = source.byte() % 5, source.rest()
    version = scratch() / "version"
    (version / "releases" / _DIGEST).mkdir(parents=True, exist_ok=True)
    try:
        if kind == 0:
            (version / "current").write_bytes(rest)
            assert current_digest(version).encode() == rest.removesuffix(b"\n")
        elif kind == 1:
            (version / HISTORY).write_bytes(rest)
            for served in read_history(version):
                written = datetime.fromtimestamp(served.until, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
                assert f"{written} {served.digest}".encode() in rest
        elif kind == 2:
            assert choose_release(version, rest.decode("utf-8", "replace")) == _DIGEST
        elif kind == 3:
            name = rest.decode("utf-8", "replace")
            load_release(version, name, model="m", trust=TrustSettings(keys=(version / "none.pub",)))
            raise AssertionError("a release without a signature")
        else:
            _named(rest.decode("utf-8", "surrogateescape"))
    except ReleaseError as error:
        plain(error)


def _named(name: str) -> None:
    """A file of that name in a release."""
    folder = scratch() / "named"
    folder.mkdir(exist_ok=True)
    for left in folder.iterdir():
        left.unlink()
    if not name or {"/", "\0"} & set(name) or name in (".", "..") or len(name) > 60:
        return  # no name that a file can have
    (folder / name).write_bytes(b"")
    with ReleaseFolder.open(folder) as opened:
        assert opened.files() == {name}
    assert name.isascii()
    assert name.isprintable()
