"""Turns what the rooms and the operating system refuse into the command's own one-line errors."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from scripts.errors import CommandError, DiskError, RejectedError, UsageError


@contextmanager
def engine_refusals() -> Iterator[None]:
    """A refused release exits 1 with its step, expected and found; options no engine can have exit 2."""
    from engines import BuildError, EngineError

    try:
        yield
    except BuildError as error:
        raise UsageError(str(error)) from error
    except EngineError as error:
        raise RejectedError(str(error)) from error


@contextmanager
def one_line_errors(*, debug: bool) -> Iterator[None]:
    """Every error that is not our bug leaves as a CommandError; `debug` prints where it came from first."""
    try:
        yield
    except BrokenPipeError:
        raise
    except Exception as error:
        if debug:
            traceback.print_exception(error)
        if isinstance(error, CommandError) or (known := _known(error)) is None:
            raise
        raise known from error


def _known(error: Exception) -> CommandError | None:
    from backend.errors import BackendError
    from cachemgr import CacheError
    from engines import BuildError, EngineError

    if isinstance(error, OSError):
        return DiskError.of(error)
    if isinstance(error, BuildError):
        return UsageError(str(error))
    if isinstance(error, EngineError | CacheError | BackendError):
        return RejectedError(str(error))
    return None
