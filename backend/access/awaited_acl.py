"""No access control until an acl file appears where one is obeyed; from then on what it says.

Who puts the file beside the settings of a running server means it. One that cannot be read changes nothing,
and the log says so. Nothing leads back: once it is obeyed, a file that vanishes stays in force.

Threads: any; `_look` on a thread of its own, which ends when the file is in force.
"""

import logging
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from backend.access.acl_access import open_acl_access
from backend.access.audit import AuditLog
from backend.access.contract import Access, Caller, Verb
from backend.access.open_access import OpenAccess
from backend.errors import ConfigError
from backend.thread_names import show_thread_name
from cachemgr import NamespaceShare

log = logging.getLogger(__name__)

LOOK_S: Final = 0.5
CLOSE_S: Final = 5.0

Shares = Mapping[str, NamespaceShare]


class AwaitedAcl:
    """Authoriser and Allowances in one: nobody's limits before the file is there, its own afterwards."""

    def __init__(
        self, model: str, path: Path, *, probe_secret: bytes | None = None, look_s: float = LOOK_S
    ) -> None:
        self._model = model
        self._path = path
        self._probe_secret = probe_secret
        self._look_s = look_s
        self._open = OpenAccess()
        self._acl: Access | None = None
        self._capacity = 0
        self._lock = threading.Lock()  # orders who follows, and how much room there is, against `_obey`
        self._listeners: list[Callable[[Shares], None]] = []
        self._trouble = ""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._look, name="acl-awaited", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def authorise(self, parameters: Mapping[str, object], *, verb: Verb) -> Caller:
        """See Authoriser."""
        acl = self._acl
        return (self._open if acl is None else acl.authoriser).authorise(parameters, verb=verb)

    def follow(self, listener: Callable[[Shares], None]) -> None:
        """See Authoriser."""
        with self._lock:
            self._listeners.append(listener)
            if self._acl is not None:
                self._acl.authoriser.follow(listener)

    @property
    def principals(self) -> int:
        """See Authoriser."""
        return 1 if self._acl is None else self._acl.authoriser.principals

    def close(self) -> None:
        """See Authoriser."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)
        if self._acl is not None:
            self._acl.authoriser.close()

    def bound(self, capacity: int) -> None:
        """See Allowances."""
        with self._lock:
            self._capacity = capacity
            if self._acl is not None:
                self._acl.allowances.bound(capacity)

    def enter(self, caller: Caller) -> None:
        """See Allowances. Who was let in before the file was there is nobody in it, and is not counted."""
        if self._acl is not None and caller.principal:
            self._acl.allowances.enter(caller)

    def charge(self, caller: Caller, tokens: int) -> None:
        """See Allowances."""
        if self._acl is not None and caller.principal:
            self._acl.allowances.charge(caller, tokens)

    def leave(self, caller: Caller, *, tokens: int) -> None:
        """See Allowances."""
        if self._acl is not None and caller.principal:
            self._acl.allowances.leave(caller, tokens=tokens)

    def _look(self) -> None:
        show_thread_name()
        while not self._closing.wait(self._look_s):
            try:
                if os.path.lexists(self._path) and self._obey():
                    return
            except Exception:  # a fault of ours must not leave the door open for good
                log.exception("acl: a look for %s failed", self._path)

    def _obey(self) -> bool:
        """Put the file in force; False if it cannot be read."""
        try:
            acl = open_acl_access(self._model, self._path, probe_secret=self._probe_secret)
        except ConfigError as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                log.error("acl: %s; everybody is still let in until this is mended", error)
            return False
        with self._lock:
            acl.allowances.bound(self._capacity)
            for listener in self._listeners:
                acl.authoriser.follow(listener)
            self._acl = acl
        log.warning("access control is on from now on, by %s", self._path)
        return True


def await_acl(model: str, path: Path, *, probe_secret: bytes | None = None) -> Access:
    """Everybody, without limits, until there is a file at `path`."""
    awaited = AwaitedAcl(model, path, probe_secret=probe_secret)
    awaited.start()
    return Access(awaited, awaited, AuditLog(model))
