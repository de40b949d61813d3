"""Table: rows of short texts, aligned for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def as_text(rows: Sequence[Sequence[str]], notes: Iterable[str] = ()) -> str:
    """Align rows of cells: two spaces between columns, the first flush left, the others right; then the notes."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]).rstrip() for first, *rest in rows]
    return "\n".join([*lines, *notes])
