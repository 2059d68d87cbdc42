"""A name for a folder that Triton can use, whatever the folder is called.

Triton starts the processes of its Python backend through a shell without quoting, so a space or a quote in
a path breaks the command; and the Python inside them takes paths in ASCII alone, whatever the locale.
Neither can be told otherwise, so a folder with such a path is served under a symbolic link.
"""

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.errors import UsageError

_PLAIN = re.compile(r"[A-Za-z0-9_./+,@%=-]+")


@contextmanager
def plain_path(folder: Path, *, links: Path | None = None) -> Iterator[Path]:
    """`folder`, or a link to it in a private folder under `links` that is gone afterwards."""
    if _PLAIN.fullmatch(str(folder)):
        yield folder
        return
    parent = links or Path(tempfile.gettempdir())
    if not _PLAIN.fullmatch(str(parent)):
        raise UsageError(
            f"Triton cannot serve from {folder}: its path and that of the temporary folder {parent} hold "
            "more than ASCII letters, digits and . _ - / + , @ % =; set TMPDIR=/tmp or choose another --home"
        )
    with tempfile.TemporaryDirectory(prefix="tensorcache-", dir=parent) as private:
        link = Path(private) / "home"
        link.symlink_to(folder, target_is_directory=True)
        yield link
