"""Turns what engines refuses into the command's own one-line errors."""

from collections.abc import Iterator
from contextlib import contextmanager

from scripts.errors import RejectedError, UsageError


@contextmanager
def engine_refusals() -> Iterator[None]:
    """A refused release exits 1 with its step, expected and found; options no engine can have exit 2."""
    from engines import BuildError, EngineError

    try:
        yield
    except BuildError as error:
        raise UsageError(str(error)) from None
    except EngineError as error:
        raise RejectedError(str(error)) from None
