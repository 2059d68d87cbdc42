"""Changes an acl file that a server may be following: the whole new text, or the old one.

Two commands at once take turns by a lock on the folder, which leaves no file behind. An editor knows no such
lock; what it saved while we were thinking is not overwritten but read again.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from backend.access import Acl
from backend.access.acl_file import decode_acl, read_acl_bytes
from backend.errors import ConfigError
from scripts.errors import UsageError
from scripts.whole_file import write_whole

LOCK_S: Final = 10.0
_AGAIN_S = 0.02
_ATTEMPTS = 5
_HEADER = b"# Who may do what. `tensorcache acl check` says whether it is right, `acl list` what it means.\n"

Change = Callable[[Acl], str]
"""What to append, given what the file says."""


def append_to_acl(path: Path, change: Change) -> None:
    """Append what `change` says, if the result can be read; make the file, 0600, if there is none.

    Comments, order, mode and owner stay. ConfigError names what is wrong, before or after.
    """
    target = path.resolve()
    if not target.parent.is_dir():
        raise UsageError(f"{target.parent}: is no folder: make it, or name the acl file with --acl")
    with _turn(target.parent):
        for _ in range(_ATTEMPTS):
            before = _read(target)
            after = _appended(target, before, change)
            if _read(target) == before:
                like = None if before is None else target.stat()
                write_whole(target, after, mode=0o600, like=like)
                return
    raise UsageError(f"{path}: was changed again and again meanwhile: close the editor and try again")


def acl_at(path: Path) -> Acl:
    """What the file says; nobody, if there is none."""
    content = _read(path.resolve())
    return Acl({}, {}) if content is None else decode_acl(content, path)


def _read(target: Path) -> bytes | None:
    return read_acl_bytes(target) if os.path.lexists(target) else None


def _appended(target: Path, before: bytes | None, change: Change) -> bytes:
    old = Acl({}, {}) if before is None else decode_acl(before, target)
    addition = change(old)
    start = _HEADER if before is None else before
    if start and not start.endswith(b"\n"):
        start += b"\n"
    try:
        after = start + b"\n" + addition.encode()
    except UnicodeEncodeError:
        raise UsageError("names and globs must be text that UTF-8 can carry") from None
    try:
        new = decode_acl(after, target)
    except ConfigError as error:
        raise ConfigError(
            f"nothing was written, the file would not be right: {error}{_hint(error)}"
        ) from None
    _check_kept(old, new)
    return after


def _hint(error: ConfigError) -> str:
    form = ": only [principals.NAME] and [[principals.NAME.keys]] can be appended to"
    return form if "expected TOML" in str(error) else ""


def _check_kept(old: Acl, new: Acl) -> None:
    """Nothing that was there may mean anything else: the text was appended to, and that is all."""
    for name, before in old.principals.items():
        now = new.principals.get(name)
        assert now is not None, "a principal got lost"
        assert (now.namespace, now.models, now.verbs) == (before.namespace, before.models, before.verbs)
        assert now.keys[: len(before.keys)] == before.keys, "keys got lost"


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Nobody else changes an acl file of the folder with this command meanwhile."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + LOCK_S
        while not _locked(handle):
            if time.monotonic() > deadline:
                raise UsageError(f"{folder}: another command has held its lock for {LOCK_S:.0f} s: try again")
            time.sleep(_AGAIN_S)
        yield
    finally:
        os.close(handle)


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
