"""Text for people: counts of bytes, and rows of short texts aligned for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(nbytes: float) -> str:
    """Format a count of bytes: "512 B", "1.5 KiB", "12.0 MiB". A negative one keeps its sign."""
    amount, unit = float(nbytes), 0
    while abs(amount) >= 1024 and unit < len(_UNITS) - 1:
        amount, unit = amount / 1024, unit + 1
    return f"{amount:.1f} {_UNITS[unit]}" if unit else f"{amount:.0f} B"


def as_text(rows: Sequence[Sequence[str]], notes: Iterable[str] = ()) -> str:
    """Align rows of cells: two spaces between columns, the first flush left, the others right; then the notes."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]).rstrip() for first, *rest in rows]
    return "\n".join([*lines, *notes])
