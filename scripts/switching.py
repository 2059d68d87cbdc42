"""Carries out a change of the current release, and says what happened and what serves now.

`current` is the commit point: once it has moved the change is made, whether a server runs or not. A running
server sees it within a second, verifies the release and takes it up, or refuses it and goes on with the old
one; this waits for either.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.console import say, seconds_text, working
from scripts.errors import RejectedError
from scripts.served_release import SHORT, Served, ServerView, Watch, add_server
from scripts.server_log import ServerLog

if TYPE_CHECKING:
    from engines import Switch

DEFAULT_WAIT_S = 60.0

WAITING = f"""
Without --wait, a server that answers at --url with another release of this repository is given
{DEFAULT_WAIT_S:g} s to take up the new one. With --wait SECONDS the exit code is 1 if it does not in time;
--wait 0 only looks. If the server refuses the release the exit code is 1; `current` stays switched:
`rollback` brings the old one back.
"""


def add_waiting(parser: argparse.ArgumentParser) -> None:
    """--url, --metrics-port, --wait."""
    add_server(parser)
    parser.add_argument(
        "--wait",
        type=waiting_seconds,
        metavar="SECONDS",
        help="until the server answers with the new release; exit code 1 if it does not in time",
    )


def waiting_seconds(text: str) -> float:
    """Seconds from 0 to a day."""
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected seconds, got {text!r}") from None
    if not 0 <= number <= 86400:
        raise argparse.ArgumentTypeError(f"expected seconds from 0 to 86400, got {text}")
    return number


def carry_out(
    change: Callable[[], "Switch"],
    *,
    version_dir: Path,
    server: ServerView,
    wait_s: float | None,
    log: Path | None,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Make the change, then say what serves. RejectedError if the server refuses, or is late for `wait_s`."""
    watch = Watch(server, ServerLog(log), clock=clock, pause=pause)
    done = change()
    name = f"release {done.release} ({done.digest[:SHORT]})"
    if done.changed:
        say(f"current      {name} in {version_dir}")
        say(f"before       {'nothing' if done.before is None else done.before[:SHORT]}")
    else:
        say(f"current      {name} in {version_dir}, as before")
    served = server.ask()
    settled = _settled(served, done.digest, version_dir=version_dir, server=server, asked=bool(wait_s))
    if settled:
        say(f"serves now   {settled}")
        return
    _follow(watch, done.digest, version_dir=version_dir, wait_s=wait_s)


def _settled(served: Served, digest: str, *, version_dir: Path, server: ServerView, asked: bool) -> str:
    """What there is to say without waiting; empty if the answer may still change."""
    if served.release and digest.startswith(served.release):
        return f"{served.release} at {server.url}"
    if asked:
        return ""
    if not served.reachable or not served.loaded:
        return f"nothing at {server.url} ({served.reason}): the next load takes it"
    if served.release and not any((version_dir / "releases").glob(f"{served.release}*")):
        return f"{served.release} at {server.url}, which is no release of this repository: not waited for"
    if server.swap_is_off():
        return (
            f"{served.release or 'unknown'} at {server.url}; its swap is off: load the model to change that"
        )
    return ""


def _follow(watch: Watch, digest: str, *, version_dir: Path, wait_s: float | None) -> None:
    from engines.release_list import current_or_none

    url = watch.server.url
    with working(f"wait for the server at {url}"):
        outcome = watch.wait(
            digest,
            limit_s=DEFAULT_WAIT_S if wait_s is None else wait_s,
            wanted=lambda: current_or_none(version_dir) == digest,
        )
    if outcome.serves:
        say(f"serves now   {outcome.last.release} at {url}, after {seconds_text(outcome.seconds)}")
        return
    still = outcome.last.release or f"unknown ({outcome.last.reason})"
    if outcome.refused:
        raise RejectedError(
            f"the server at {url} refused {digest[:SHORT]}: {outcome.refused}; serves: {still}"
        )
    late = f"{still} at {url}, after {seconds_text(outcome.seconds)}"
    if outcome.put_off:
        late = f"{late}; the swap is put off and tried again: {outcome.put_off}"
    current = current_or_none(version_dir)
    if current is not None and current != digest:
        late = f"{late}; current names {current[:SHORT]} meanwhile"
    if wait_s:
        raise RejectedError(f"{digest[:SHORT]} does not serve: {late}")
    say(f"serves now   {late}; not {digest[:SHORT]} yet")
