"""`tensorcache releases`: what releases of a model there are, which one is current, and which one serves."""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.arguments import Verbs, add_verb, positive
from scripts.console import say, size_text
from scripts.errors import RejectedError
from scripts.refusals import engine_refusals
from scripts.repository import Repository, add_repository, repository_from
from scripts.served_release import SHORT, Served, ServerView, add_server, server_from

if TYPE_CHECKING:
    from engines import ListedRelease

EXAMPLES = """
  tensorcache releases smollm2
  tensorcache releases smollm2 --home /srv/llm --url 127.0.0.1:9000
  tensorcache releases smollm2 --prune 3     # remove all but the 3 newest

`verified` stands for signature, names, age and sizes; `tensorcache verify` reads every byte. --prune never
removes the current release, the previous one (which `rollback` goes to), or one that the server serves.
"""
COLUMNS = ("release", "digest", "runtime", "precision", "kv identity", "size", "published", "", "signature")


def add_parser(verbs: Verbs) -> None:
    """Add this verb to the command line."""
    parser = add_verb(
        verbs, "releases", summary="list the releases of a model, or remove old ones", examples=EXAMPLES
    )
    parser.add_argument("model", help="model name")
    parser.add_argument(
        "--prune", type=positive, metavar="KEEP", help="remove all but the KEEP newest releases"
    )
    add_repository(parser)
    add_server(parser)
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the table; with --prune, after removing."""
    from engines import list_releases

    model, repository = arguments.model, repository_from(arguments)
    version_dir = repository.version_dir(model)
    server = server_from(arguments, model)
    served = server.ask()
    with engine_refusals():
        if arguments.prune is not None:
            _prune(repository, version_dir, model, keep=arguments.prune, served=served, server=server)
        listed = list_releases(version_dir, model=model, trust=repository.trust)
    say(f"releases of {model} in {version_dir}")
    for line in aligned((COLUMNS, *table_rows(listed, served))):
        say(line)
    for one in listed:
        if one.refusal is not None:
            say(f"refused      {one.digest[:SHORT]} {one.refusal}")
    say(f"serves now   {_serving_text(served, listed, server.url)}")
    return 0


def table_rows(listed: "Sequence[ListedRelease]", served: Served) -> list[tuple[str, ...]]:
    """One row a release, newest first."""
    return [
        (
            _number(one),
            one.digest[:SHORT],
            "?" if one.manifest is None else one.manifest.runtime,
            "?" if one.manifest is None else one.manifest.precision,
            "?" if one.manifest is None else one.manifest.kv_identity[:12],
            size_text(one.nbytes),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(one.published)),
            _marks(one, served),
            "verified" if one.refusal is None else f"refused: {one.refusal.step}",
        )
        for one in listed
    ]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with columns as wide as their widest cell; never cut or folded: logs and grep have all."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _number(one: "ListedRelease") -> str:
    return "?" if one.manifest is None else str(one.release)


def _marks(one: "ListedRelease", served: Served) -> str:
    serves = bool(served.release) and one.digest.startswith(served.release)
    marks = {"current": one.current, "previous": one.previous, "serves": serves}
    return ", ".join(mark for mark, given in marks.items() if given)


def _serving_text(served: Served, listed: "Sequence[ListedRelease]", url: str) -> str:
    if not served.release:
        known = "unknown" if served.reachable and served.loaded else "nothing"
        return f"{known} at {url} ({served.reason})"
    numbers = [_number(one) for one in listed if one.digest.startswith(served.release)]
    name = f"release {numbers[0]} ({served.release})" if numbers else f"{served.release}, which is not here,"
    return f"{name} at {url}"


def _prune(
    repository: Repository, version_dir: Path, model: str, *, keep: int, served: Served, server: ServerView
) -> None:
    from engines import prune_releases

    if served.reachable and served.loaded and not served.release:
        raise RejectedError(
            f"nothing removed: {server.url} does not tell which release it serves: {served.reason}"
        )
    spare = (served.release,) if served.release else ()
    removed = prune_releases(version_dir, keep=keep, spare=spare, model=model, trust=repository.trust)
    for one in removed:
        say(f"removed      release {_number(one)} ({one.digest[:SHORT]}), {size_text(one.nbytes)}")
    if not removed:
        say("removed      nothing")
