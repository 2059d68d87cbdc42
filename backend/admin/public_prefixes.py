"""The prefixes of one model that an admin made public: a folder that all processes of the node follow.

Invariants
- What cannot be read is not public: it costs hits, and tells nobody anything.
- Listeners hear of every change, in order, whichever process made it.

Threads: any. The lock orders looks, and what listeners hear; they are told under it.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from backend.admin.prefix_file import (
    NAME,
    NAME_RULE,
    SUFFIX,
    PrefixError,
    PublicPrefix,
    decode_prefix,
    read_prefix_bytes,
    sync_folder,
    write_prefix_file,
)
from backend.errors import ConfigError, InvalidRequest, Overloaded
from backend.printable import printable
from backend.thread_names import show_thread_name

log = logging.getLogger(__name__)

MAX_PREFIXES: Final = 256
MAX_TOKENS: Final = 1 << 20
"""Of all prefixes of a model together: after each change all of them are hashed."""

LOOK_S: Final = 0.5
CLOSE_S: Final = 5.0
"""A file server that does not answer must not keep the backend from closing."""

Tokens = npt.NDArray[np.int64]
Listener = Callable[[Sequence[Tokens]], None]
_Found = PublicPrefix | str
"""Or why it is none."""


class PublicPrefixes:
    """Those of `model`, one file each under `folder`/`model`."""

    def __init__(
        self,
        folder: Path,
        model: str,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        look_s: float = LOOK_S,
    ) -> None:
        """Looks once. `start` looks again and again. ConfigError for a model that cannot be a folder."""
        if model in ("", ".", "..") or "/" in model or "\0" in model:
            raise ConfigError(f"model: must be a name that a folder can have, found {printable(model)}")
        self._folder = folder / model
        self._model = model
        self._now = now
        self._look_s = look_s
        self._lock = threading.RLock()
        self._read: dict[str, tuple[bytes, _Found]] = {}
        self._in_force: tuple[PublicPrefix, ...] = ()
        self._troubles: frozenset[str] = frozenset()
        self._listeners: list[Listener] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="public-prefixes", daemon=True)
        self.look()

    def start(self) -> None:
        """Notice from now on what other processes change."""
        self._thread.start()

    def close(self) -> None:
        """Look no more. Idempotent."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    def registered(self) -> tuple[PublicPrefix, ...]:
        """What is public now, by name."""
        self.look()
        return self._in_force

    def prefixes(self) -> list[Tokens]:
        """The tokens of what is public now."""
        return [prefix.tokens for prefix in self.registered()]

    def follow(self, listener: Listener) -> None:
        """Call it with the tokens of all that is public: now, and after every change."""
        with self._lock:
            self._listeners.append(listener)
            self._tell(listener)

    def add(self, name: str, tokens: Tokens, *, by: str) -> bool:
        """From now on these are public; False if they are already, under this name.

        Raises InvalidRequest for a name that is none or taken, Overloaded when there are too many, and
        ConfigError if the file cannot be written.
        """
        _check_name(name)
        with self._lock:
            self.look()
            if (there := self._named(name)) is not None:
                return self._same(there, tokens)
            self._check_room(len(tokens))
            tokens = tokens.astype(np.int64)
            try:
                write_prefix_file(self._folder, self._model, PublicPrefix(name, tokens, self._now(), by))
            except FileExistsError:  # another process was faster, or what is there is no prefix
                self.look()
                return self._same(self._named(name), tokens)
            except OSError as error:
                raise self._unusable(error) from None
            self.look()
            return True

    def remove(self, name: str) -> None:
        """It is no longer public; what is cached of it under its public name is used by nobody any more.

        Raises InvalidRequest if there is none, ConfigError if the file cannot be removed.
        """
        _check_name(name)
        with self._lock:
            try:
                (self._folder / f"{name}{SUFFIX}").unlink()
                sync_folder(self._folder)
            except FileNotFoundError:
                raise InvalidRequest("name", "no public prefix of this model has it", name) from None
            except OSError as error:
                raise self._unusable(error) from None
            self.look()

    def look(self) -> None:
        """See what is there now; listeners hear of it if it has changed."""
        with self._lock:
            found, troubles = self._find()
            for trouble in sorted(troubles - self._troubles):
                log.error("public prefixes: %s; it is not public until this is mended", trouble)
            self._troubles = troubles
            if found == self._in_force:
                return
            self._in_force = found
            log.info("public prefixes of %s: %s", self._model, ", ".join(one.name for one in found) or "none")
            for listener in self._listeners:
                self._tell(listener)

    def _find(self) -> tuple[tuple[PublicPrefix, ...], frozenset[str]]:
        """What is public, and what is wrong."""
        try:
            paths = sorted(path for path in self._folder.iterdir() if path.name.endswith(SUFFIX))
        except FileNotFoundError:
            paths = []
        except OSError as error:
            return (), frozenset({f"{self._folder}: cannot be read: {error.strerror}"})
        read, self._read = self._read, {}
        found: list[PublicPrefix] = []
        troubles: set[str] = set()
        room = MAX_TOKENS
        for path in paths:
            try:
                if len(found) == MAX_PREFIXES:
                    raise PrefixError(f"is beyond the {MAX_PREFIXES} prefixes that a model may have")
                prefix = self._load(path, read)
                if len(prefix.tokens) > room:
                    raise PrefixError(f"is beyond the {MAX_TOKENS} tokens that prefixes of a model may have")
            except FileNotFoundError:
                continue  # it was removed meanwhile
            except PrefixError as error:
                troubles.add(f"{printable(str(path))}: {error}")
                continue
            found.append(prefix)
            room -= len(prefix.tokens)
        return tuple(found), frozenset(troubles)

    def _load(self, path: Path, read: Mapping[str, tuple[bytes, _Found]]) -> PublicPrefix:
        """What a file holds: read each time, because no stamp tells every edit, and decoded once."""
        name = path.name.removesuffix(SUFFIX)
        if NAME.fullmatch(name) is None:
            raise PrefixError(f"the name of a prefix must be {NAME_RULE}")
        content = read_prefix_bytes(path)
        before = read.get(name)
        if before is None or before[0] != content:
            before = content, self._decode(content, name)
        self._read[name] = before
        if isinstance(before[1], str):
            raise PrefixError(before[1])
        return before[1]

    def _decode(self, content: bytes, name: str) -> _Found:
        try:
            return decode_prefix(content, self._model, name)
        except PrefixError as error:
            return str(error)

    def _named(self, name: str) -> PublicPrefix | None:
        return next((one for one in self._in_force if one.name == name), None)

    def _same(self, there: PublicPrefix | None, tokens: Tokens) -> bool:
        """False if it is the same; InvalidRequest if not."""
        if there is not None and np.array_equal(there.tokens, tokens):
            return False
        what = "something that is none" if there is None else f"{len(there.tokens)} other tokens"
        raise InvalidRequest("name", f"is taken by {what}: remove it first, or choose another one")

    def _check_room(self, tokens: int) -> None:
        if len(self._in_force) >= MAX_PREFIXES:
            raise Overloaded(
                f"this model has {MAX_PREFIXES} public prefixes, and may not have more: remove one"
            )
        total = sum(len(one.tokens) for one in self._in_force)
        if total + tokens > MAX_TOKENS:
            raise Overloaded(
                f"public prefixes of a model may have {MAX_TOKENS} tokens together: {total} are there, "
                f"and {tokens} more would be too many; remove one"
            )

    def _tell(self, listener: Listener) -> None:
        try:
            listener([prefix.tokens for prefix in self._in_force])
        except Exception:  # the others must hear it all the same
            log.exception("public prefixes: a change could not be told")

    def _unusable(self, error: OSError) -> ConfigError:
        return ConfigError(f"access.public_dir: {self._folder} cannot be changed: {error.strerror}")

    def _run(self) -> None:
        show_thread_name()
        while not self._closing.wait(self._look_s):
            try:
                self.look()
            except Exception:  # a fault of ours must not freeze what is public until the next start
                log.exception("public prefixes: a look at %s failed", self._folder)


def _check_name(name: str) -> None:
    if NAME.fullmatch(name) is None:
        raise InvalidRequest("name", f"must be {NAME_RULE}", name)
