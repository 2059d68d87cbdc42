"""Which release a process begins with: the one that `current` names, else one that was current before.

A swap to a release that does not pass leaves `current` on it, and the old release serving. When that process
is killed, whatever the reason, the next one must not stay without any: it begins with the latest release of
the history that passes the whole load chain. The swapper then tries `current` as ever, and says and counts
what refuses it.
"""

import logging
import traceback
from pathlib import Path
from typing import Final

from backend.open_release import OpenRelease
from backend.swap_refusal import refusal_of
from backend.swapper import ReleaseOpener
from engines import Runner, earlier_releases

log = logging.getLogger(__name__)

MOST_TRIED: Final = 3
"""Each takes as long as a load."""


def open_first(opener: ReleaseOpener, version_dir: Path, *, run: Runner) -> OpenRelease:
    """The first that opens. Raises what `current` was refused for if none does."""
    try:
        return opener.current(beside=None, run=run)
    except Exception as error:
        earlier = earlier_releases(version_dir)[:MOST_TRIED]
        if not earlier:
            raise
        refused = _told(error)
    for digest in earlier:
        try:
            opened = opener.published(digest, run=run)
        except Exception as error:
            _told(error)
        else:
            log.warning(
                "begins with release %d (%s), which was current before", opened.spec.release, opened.name
            )
            return opened
    raise refused


def _told(error: Exception) -> Exception:
    """The error without its frames, which hold what was read: room for the next one."""
    refusal = refusal_of(error)
    if refusal.unexpected:
        log.error("load failed unexpectedly\n%s", "".join(traceback.format_exception(error)).rstrip())
    else:
        log.error("does not load: %s", refusal.text)
    error.__context__ = None
    return error.with_traceback(None)
