"""Text for people: counts of bytes, values, and aligned tables; and whether a picture can be drawn."""

from __future__ import annotations

import html
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

from ._errors import ConfigError

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class Bytes(int):
    """A count of bytes that is shown as it was written: 8GiB. One written as a number is shown in its largest unit."""

    text: str

    def __new__(cls, nbytes: int, text: str = "") -> Self:
        """Make one of a number, and its text if it has one."""
        made = super().__new__(cls, nbytes)
        made.text = text or exact_size(nbytes)
        return made

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return repr(self.text)


def exact_size(nbytes: int) -> str:
    """Write a count of bytes in the shortest way that a setting accepts and that loses nothing: "8GiB", "5MB"."""
    if nbytes == 0:
        return "0"
    ways = [(nbytes, "B")]
    for power, prefix in enumerate("KMGT", 1):
        ways += [(nbytes // 1000**power, f"{prefix}B")] * (nbytes % 1000**power == 0)
        ways += [(nbytes // 1024**power, f"{prefix}iB")] * (nbytes % 1024**power == 0)
    return min((f"{count}{unit}" for count, unit in ways), key=lambda text: len(text.rstrip("KMGTiB")))


def size(nbytes: float) -> str:
    """Format a count of bytes: "512 B", "1.5 KiB", "12.0 MiB". A negative one keeps its sign."""
    amount, unit = float(nbytes), 0
    while abs(amount) >= 1024 and unit < len(_UNITS) - 1:
        amount, unit = amount / 1024, unit + 1
    return f"{amount:.1f} {_UNITS[unit]}" if unit else f"{amount:.0f} B"


def short(nbytes: float) -> str:
    """Format a count of bytes in a sentence: "512 B", "1.5 KiB", "244 MiB", "8 GiB"."""
    number, unit = size(nbytes).split()
    amount = float(number)
    return f"{amount:.0f} {unit}" if abs(amount) >= 100 else f"{amount:.3g} {unit}"


def numbers(ordered: Iterable[int]) -> str:
    """List numbers, three or more in a row by the first and the last: "0, 1", "0 to 7, 16"."""
    runs: list[list[int]] = []
    for number in ordered:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def value_text(value: Any) -> str:
    """Format the value of a setting: a switch, several paths, or anything else; a size as it was written."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return ":".join(map(str, value)) if isinstance(value, tuple) else str(value)


def as_text(rows: Sequence[Sequence[str]], notes: Iterable[str] = ()) -> str:
    """Align rows of cells: two spaces between columns, the first flush left, the others flush right; then notes."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]).rstrip() for first, *rest in rows]
    return "\n".join([*lines, *notes])


def as_html(rows: Sequence[Sequence[str]], notes: Iterable[str] = (), *, heads: int = 1) -> str:
    """Make an HTML table of rows of cells, the first `heads` as its head; then notes.

    Cells align as in `as_text`; leading spaces of a label indent it.
    """
    lines = []
    for number, (first, *rest) in enumerate(rows):
        kind = "th" if number < heads else "td"
        indent = (len(first) - len(first.lstrip())) / 2
        cells = [f'<{kind} style="text-align:left;padding-left:{indent:.2g}em">{html.escape(first.strip())}</{kind}>']
        cells += [f'<{kind} style="text-align:right;white-space:nowrap">{html.escape(cell)}</{kind}>' for cell in rest]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return "\n".join(["<table>", *lines, "</table>", *(f"<p>{html.escape(note)}</p>" for note in notes)])


def check_picture(path: str | os.PathLike[str], what: str) -> None:
    """Check that a picture of `what` can be drawn there, before its contents are computed.

    Raises:
        ConfigError: matplotlib is not installed or does not know the path's ending, or the directory does not exist.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise ConfigError(
            f"a picture of {what} needs matplotlib, which is not installed; pip install 'tba-offload[plot]'"
        ) from None
    known = Figure().canvas.get_supported_filetypes()
    _check_target(path, "picture", known)


def check_page(path: str | os.PathLike[str]) -> None:
    """Check that an HTML page can be written there. Raises ConfigError as `check_picture` does."""
    _check_target(path, "report", ["html"])


def _check_target(path: str | os.PathLike[str], what: str, endings: Iterable[str]) -> None:
    target = Path(path)
    if target.suffix[1:].lower() not in endings:
        raise ConfigError(f"the path of a {what}, {str(target)!r}, must end in .{', .'.join(sorted(endings))}")
    if not target.parent.is_dir():
        raise ConfigError(
            f"a {what} cannot be written to {str(target)!r}: there is no directory {target.parent}; create it"
        )
