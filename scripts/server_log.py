"""What a server wrote to its log about releases that it refused, since somebody began to look."""

import os
import re
from pathlib import Path
from typing import NamedTuple

_MOST_BYTES = 1 << 20
_REFUSED = re.compile(r"swap to ([0-9a-f]{16}) refused, [^:]*: (.*)")
_PUT_OFF = "drain:"


class Refused(NamedTuple):
    """`release`: the first digits of its digest; `text`: step, expected and found."""

    release: str
    text: str


class ServerLog:
    """The part of a log that is written from now on; None and a file that is not there are empty."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._start = self._size()

    def refusals(self) -> list[Refused]:
        """Releases that were refused, in order; a swap that was merely put off is none."""
        return [one for one in self._told() if not one.text.startswith(_PUT_OFF)]

    def put_off(self) -> list[Refused]:
        """Swaps that were put off, to be tried again."""
        return [one for one in self._told() if one.text.startswith(_PUT_OFF)]

    def _told(self) -> list[Refused]:
        found = (_REFUSED.search(line) for line in self._lines())
        return [Refused(match[1], match[2].strip()) for match in found if match is not None]

    def _size(self) -> int:
        try:
            return 0 if self._path is None else self._path.stat().st_size
        except OSError:  # no server of this home ever ran
            return 0

    def _lines(self) -> list[str]:
        size = self._size()
        start = self._start if size >= self._start else 0  # a server that starts begins its log anew
        if self._path is None or size == start:
            return []
        try:
            with self._path.open("rb") as file:
                file.seek(max(start, size - _MOST_BYTES), os.SEEK_SET)
                return file.read(_MOST_BYTES).decode("utf-8", "replace").splitlines()
        except OSError:
            return []
