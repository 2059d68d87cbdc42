"""`tensorcache verify --running`: is the release that a server serves on disk as it was signed, every byte?

The server's answer names the release; its digest fixes engine.json, which fixes every other file.
"""

import time
from pathlib import Path

from scripts.console import progress_bar, say, show_table, size_text
from scripts.errors import RejectedError
from scripts.refusals import engine_refusals
from scripts.repository import Repository
from scripts.served_release import SHORT, ServerView


def verify_running(model: str, *, repository: Repository, server: ServerView, bytes_per_s: float) -> None:
    """Read the served release's folder at this rate; a verdict per file, RejectedError if one is bad."""
    from engines import Pace, inspect_release, rehash_release

    version_dir = repository.version_dir(model)
    digest = served_digest(server, version_dir)
    with engine_refusals():
        inspected = inspect_release(version_dir, digest, model=model, trust=repository.trust)
    facts = inspected.facts
    pace = Pace(bytes_per_s, clock=time.monotonic, pause=time.sleep)
    with progress_bar() as progress:
        task = progress.add_task(f"read {size_text(facts.nbytes)}", total=facts.nbytes)
        seen = rehash_release(
            facts,
            trust=repository.trust,
            pace=pace,
            on_bytes=lambda name, nbytes: progress.update(task, advance=nbytes),
        )
        progress.update(task, completed=facts.nbytes)
    bad = {one.file: one for one in seen.differences}
    rows = [
        (name, size_text(file.status.size), "differs" if name in bad else "as signed")
        for name, file in sorted(facts.files.items())
    ]
    number = inspected.manifest.release
    show_table(f"{model} release {number}, served at {server.url}", ("file", "size", "content"), rows)
    say(f"digest       {digest}")
    if bad:
        raise RejectedError(
            f"release {number} ({digest[:SHORT]}) is not as it was signed: {next(iter(bad.values()))}"
            + (f" (and {len(bad) - 1} more)" if len(bad) > 1 else "")
        )
    say(f"verified     every byte of {facts.path}")


def served_digest(server: ServerView, version_dir: Path) -> str:
    """The whole digest of what the server serves; RejectedError if it is not in the repository."""
    served = server.ask()
    if not served.release:
        raise RejectedError(f"{server.url} does not tell which release it serves: {served.reason}")
    found = [path.name for path in (version_dir / "releases").glob(f"{served.release}*")]
    if len(found) != 1:
        raise RejectedError(
            f"{server.url} serves {served.release}: expected its folder in {version_dir / 'releases'}, "
            f"found {'none' if not found else f'{len(found)} that begin like it'}"
        )
    return found[0]
