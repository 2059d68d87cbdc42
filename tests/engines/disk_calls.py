"""Every call that changes the disk, one after the other, as the place to be killed at or to be refused."""

import errno
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CALLS = ("mkdir", "open", "write", "fsync", "rename", "replace", "unlink", "rmdir", "ftruncate")

# One process that forks a child per kill point: the child counts the calls that change the disk and kills
# itself with SIGKILL at the given one, before it or after it.
KILLER = textwrap.dedent(
    """
    import os, pathlib, shutil, signal, sys
    from engines import TrustSettings, prune_releases, publish_release, roll_back
    import model_signing  # before the forks: once is enough
    from model_signing._signing import sign_ec_key, sign_sigstore_pb

    CALLS = sys.argv[1].split()
    start, new, work, key = map(pathlib.Path, sys.argv[3:7])
    trust = TrustSettings(keys=(key,))
    ACTIONS = {
        "publish": lambda place: publish_release(new, place, model="tiny", trust=trust),
        "roll back": lambda place: roll_back(place, model="tiny", trust=trust),
        "prune": lambda place: prune_releases(place, keep=1, model="tiny", trust=trust),
    }

    def die(at, after):
        count = 0
        def wrap(name):
            real = getattr(os, name)
            def call(*args, **kwargs):
                nonlocal count
                if name == "open" and not args[1] & os.O_CREAT:
                    return real(*args, **kwargs)
                count += 1
                if count == at and not after:
                    os.kill(os.getpid(), signal.SIGKILL)
                try:
                    return real(*args, **kwargs)
                finally:
                    if count == at:
                        os.kill(os.getpid(), signal.SIGKILL)
            setattr(os, name, call)
        for name in CALLS:
            wrap(name)

    at, done = 0, False
    while not done:
        at += 1
        for after in (False, True):
            place = work / f"{at}-{'after' if after else 'before'}"
            shutil.copytree(start, place)
            child = os.fork()
            if child == 0:
                die(at, after)
                ACTIONS[sys.argv[2]](place)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            if not os.WIFSIGNALED(status):
                assert os.WEXITSTATUS(status) == 0, status
                done = True
    """
)


def killed_everywhere(action: str, *, start: Path, new: Path, work: Path, key: Path) -> list[Path]:
    """What `action` ("publish", "roll back", "prune") leaves of copies of `start`, killed at every call."""
    work.mkdir()
    words = [" ".join(CALLS), action, *map(str, (start, new, work, key))]
    subprocess.run(
        [sys.executable, "-c", KILLER, *words], check=True, timeout=120, cwd=Path(__file__).parents[2]
    )
    return sorted(work.iterdir())


class Disk:
    """Counts the calls that change the disk; `refused` says whether one was."""

    def __init__(self, *, at: int, lasting: bool, reason: int) -> None:
        self._left = at
        self._lasting = lasting
        self._reason = reason
        self.refused = False

    def refuses(self) -> bool:
        """Whether this call fails."""
        self._left -= 1
        fails = self._left == 0 or (self._lasting and self._left < 0)
        self.refused = self.refused or fails
        return fails

    def error(self, args: tuple[Any, ...]) -> OSError:
        where = next((str(arg) for arg in args if isinstance(arg, str | Path)), None)
        return OSError(self._reason, os.strerror(self._reason), where)


@contextmanager
def refusing_disk(at: int, *, lasting: bool, reason: int = errno.ENOSPC) -> Iterator[Disk]:
    """The call number `at` (from 1) that would change the disk fails, and with `lasting` all after it."""
    disk = Disk(at=at, lasting=lasting, reason=reason)
    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, _wrapped(name, disk))
        yield disk


def _wrapped(name: str, disk: Disk) -> Any:
    real = getattr(os, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if (name != "open" or args[1] & os.O_CREAT) and disk.refuses():
            raise disk.error(args)
        return real(*args, **kwargs)

    return call
