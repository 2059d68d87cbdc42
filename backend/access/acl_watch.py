"""Follows an acl file while requests are answered by it: a good edit is soon in force, a bad one never.

A look reads the whole file: no stamp tells every edit, and the target of a link may change while the link
stays. What changed must be found the same twice in a row, because an editor may be writing it this moment.

Invariants
- There is always one whole Acl in force; what cannot be read, or means nothing, changes nothing.
- The same trouble is said once, and so is its end.

Threads: `look` on its own thread, or on that of a test.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from backend.access.acl import Acl
from backend.access.acl_file import decode_acl, read_acl_bytes
from backend.errors import ConfigError
from backend.thread_names import show_thread_name

log = logging.getLogger(__name__)

LOOK_S: Final = 0.25
CLOSE_S: Final = 5.0
"""A file server that does not answer must not keep the backend from closing."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """What one look found: the file, or why it could not be read."""

    content: bytes = b""
    trouble: str = ""


class AclWatch:
    """One acl file, from the first read until `close`."""

    def __init__(
        self,
        path: Path,
        changed: Callable[[Acl], None],
        *,
        beside: Callable[[], None] = lambda: None,
        look_s: float = LOOK_S,
    ) -> None:
        """Reads the file once: ConfigError if that is not possible, for then nobody could be let in.

        `changed` is told what is in force: now, and after each change. `beside` is called after every look.
        """
        self._path = path
        self._changed = changed
        self._beside = beside
        self._look_s = look_s
        self._in_force = self._before = self._decided = _Seen(read_acl_bytes(path))
        changed(decode_acl(self._in_force.content, path))
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="acl-watch", daemon=True)

    def start(self) -> None:
        """Look again and again, until `close`."""
        self._thread.start()

    def close(self) -> None:
        """Look no more. Idempotent."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    def look(self) -> None:
        """Look once; what was found now and the last time comes into force, if it can."""
        seen = self._see()
        settled, self._before = seen == self._before, seen
        if not settled or seen == self._decided:
            return
        self._decided = seen
        if seen == self._in_force:
            log.info("acl: %s is again what is in force", self._path)
            return
        try:
            if seen.trouble:
                raise ConfigError(seen.trouble)
            if not seen.content.strip():
                raise ConfigError(f"{self._path}: expected principals, found an empty file: cut short?")
            acl = decode_acl(seen.content, self._path)
        except ConfigError as error:
            log.error("acl: %s; what was in force stays so until this is mended", error)
            return
        self._in_force = seen
        self._changed(acl)
        log.info("acl: %s has changed and is in force: %d principals", self._path, len(acl.principals))

    def _see(self) -> _Seen:
        try:
            return _Seen(read_acl_bytes(self._path))
        except ConfigError as error:
            return _Seen(trouble=str(error))

    def _run(self) -> None:
        show_thread_name()
        while not self._closing.wait(self._look_s):
            try:
                self.look()
                self._beside()
            except Exception:  # a fault of ours must not freeze who is let in until the next start
                log.exception("acl: a look at %s failed", self._path)
