"""Rows as aligned text: the first column to the left, the others to the right."""

from collections.abc import Iterator, Sequence

from capo.protocol.sayings import plain


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a table; nothing at all if there are no rows."""
    if not rows:
        return
    header, *rows = [[plain(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    for row in (header, ["-" * width for width in widths], *rows):
        first, *others = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        others = [cell.strip().rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        yield "  ".join([first, *others]).rstrip()
