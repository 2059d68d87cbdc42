"""Which acl file `tensorcache acl` speaks of, and where a credential to look at comes from."""

import argparse
import re
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

from scripts.arguments import path
from scripts.console import complain
from scripts.errors import DiskError, UsageError
from scripts.repository import DEFAULT_HOME
from scripts.serving import CONFIG

STDIN = Path("-")
_MAX_CREDENTIAL = 256
_CREDENTIAL = re.compile("[a-z0-9-]{1,63}[.][A-Za-z0-9_-]{43}")


@dataclass(frozen=True, slots=True)
class AclPlace:
    """The file, and the model repository of the server that obeys it, if there is one to see."""

    acl: Path
    models: tuple[str, ...]


def add_place(parser: argparse.ArgumentParser) -> None:
    """--home, --acl."""
    parser.add_argument(
        "--home", type=path, default=DEFAULT_HOME,
        help="serving home, whose tensorcache.toml says which acl file it obeys (default %(default)s)",
    )  # fmt: skip
    parser.add_argument("--acl", type=path, metavar="FILE", help="the acl file, instead of a home's")


def place_from(arguments: argparse.Namespace) -> AclPlace:
    """Without --acl it is the file that the home's tensorcache.toml names, else acl.toml beside that."""
    home: Path = arguments.home
    if arguments.acl is not None:
        return AclPlace(arguments.acl, _models(home / "model_repository"))
    if not home.is_dir():
        raise UsageError(f"{home} is no folder: name a serving home with --home, or the file with --acl")
    return AclPlace(_acl_of(home), _models(home / "model_repository"))


def _acl_of(home: Path) -> Path:
    from backend.settings import ACL_FILE, read_node_settings

    config = home / CONFIG
    named = read_node_settings(config).access.acl if config.exists() else None
    return named or home / ACL_FILE


def _models(repository: Path) -> tuple[str, ...]:
    return tuple(sorted(found.parent.name for found in repository.glob("*/config.pbtxt")))


def add_key_file(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """--key-file. A credential among the arguments could be read by every user of the machine."""
    parser.add_argument(
        "--key-file", type=path, metavar="FILE", required=required,
        help="file with the credential alone in it; - reads it from standard input",
    )  # fmt: skip


def credential_in(file: Path) -> str:
    """The credential. UsageError if there is none; what the file holds is never said."""
    if _CREDENTIAL.fullmatch(file.name):
        raise UsageError(
            "--key-file: names a file, and not the credential: every user of this machine could read that "
            "just now, so make another key"
        )
    if file == STDIN:
        text = sys.stdin.read(_MAX_CREDENTIAL + 3)
    else:
        try:
            with file.open(encoding="utf-8", errors="replace") as source:
                mode = file.stat().st_mode
                text = source.read(_MAX_CREDENTIAL + 3)
        except OSError as error:
            raise DiskError.of(error, doing="--key-file") from None
        if stat.S_ISREG(mode) and mode & 0o077:
            complain(f"{file}: others may read this credential (mode {stat.S_IMODE(mode):04o}): chmod 600 it")
    found = text.strip()
    if not found or len(found) > _MAX_CREDENTIAL or not found.isprintable() or " " in found:
        raise UsageError(
            f"--key-file {file}: expected one line, the credential (id.secret), and nothing else"
        )
    return found
