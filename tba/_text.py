"""Text: counts of bytes as people read them, and rows aligned for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(nbytes: float) -> str:
    """As "512 B", "1.5 KiB", "12.0 MiB"; a negative count keeps its sign."""
    amount, unit = float(nbytes), 0
    while abs(amount) >= 1024 and unit < len(_UNITS) - 1:
        amount, unit = amount / 1024, unit + 1
    return f"{amount:.1f} {_UNITS[unit]}" if unit else f"{amount:.0f} B"


def as_text(rows: Sequence[Sequence[str]], notes: Iterable[str] = ()) -> str:
    """Columns two spaces apart, the first to the left and the others to the right; a line for each note below."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()  # one row
        for row in rows
    ]
    return "\n".join([*lines, *notes])
