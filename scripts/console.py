"""How the command talks to a person: aligned tables, progress bars, and sizes one can read."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

console = Console(highlight=False, soft_wrap=True)
errors = Console(stderr=True, highlight=False, soft_wrap=True)


def say(text: str) -> None:
    """One line for the user, without markup."""
    console.print(_encodable(text, console), markup=False)


def complain(text: str) -> None:
    """One line on stderr."""
    errors.print(_encodable(f"tensorcache: {text}", errors), markup=False)


def _encodable(text: str, where: Console) -> str:
    """A path may hold bytes that are no text; they are shown as escapes."""
    return text.encode(where.encoding, "backslashreplace").decode(where.encoding)


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """An aligned table; every column but the first is right-aligned."""
    table = Table(title=_encodable(title, console), title_justify="left", title_style="bold")
    for number, column in enumerate(_encodable(column, console) for column in columns):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=number == 0)
    for row in rows:
        table.add_row(*(_encodable(cell, console) for cell in row))
    console.print(table)


@contextmanager
def working(what: str) -> Iterator[None]:
    """A spinner with the elapsed time on a terminal; two plain lines in a log."""
    if not console.is_terminal:
        say(f"{what} …")
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(what, total=None)
        yield
    say(f"✓ {what}")


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar for work whose size is known."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=not console.is_terminal) as progress:
        yield progress


@contextmanager
def progress_aside(what: str, *, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, where stdout may be read by a program; nothing in a log. Yields what advances it."""
    if not errors.is_terminal:
        yield lambda amount: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda amount: progress.advance(task, amount)


def size_text(nbytes: float) -> str:
    """`1474560` → `1.4 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"


def seconds_text(seconds: float) -> str:
    """`0.0412` → `41 ms`; from one second on, `1.24 s`."""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
