"""Table: rows of short texts, as aligned text for a terminal and as HTML for a notebook."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def as_text(rows: Sequence[Sequence[str]], notes: Iterable[str] = ()) -> str:
    """Columns two spaces apart, the first to the left and the others to the right; a line for each note below."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()  # one row
        for row in rows
    ]
    return "\n".join([*lines, *notes])


def as_html(rows: Sequence[Sequence[str]], notes: Iterable[str] = ()) -> str:
    """A table that needs no style sheet; the first row is its head. Every text is escaped."""
    head, *body = rows
    lines = [_row("th", head), *(_row("td", row) for row in body)]
    below = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    return f"<table>{''.join(lines)}</table>{below}"


def _row(tag: str, cells: Sequence[str]) -> str:
    first, *rest = map(_escaped, cells)
    numbers = "".join(f'<{tag} style="text-align:right">{cell}</{tag}>' for cell in rest)
    return f'<tr><{tag} style="text-align:left">{first}</{tag}>{numbers}</tr>'


def _escaped(cell: str) -> str:
    """Without its indent, HTML would draw a part like the whole."""
    text = cell.lstrip(" ")
    return "&nbsp;" * (len(cell) - len(text)) + html.escape(text)
