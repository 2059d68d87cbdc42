"""Tables for people and for grep: a line per row, columns as wide as their widest cell."""

from collections.abc import Collection, Sequence


def columns(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Collection[str] = ()
) -> list[str]:
    """Lines, the head's first; `numbers` names the columns that are aligned to the right. Nothing is cut."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if name in numbers else cell.ljust(width)
            for name, cell, width in zip(head, row, widths, strict=True)
        ).rstrip()
        for row in (head, *rows)
    ]
