"""Growth: time and peak of a step against its size, both on logarithmic scales, with the fitted exponents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.ticker import LogLocator, NullLocator

from .pictures import BACKWARD, OPTIMIZER, picture


class Line(NamedTuple):
    """One value of one arm at several sizes, and the exponent that was fitted."""

    sizes: Sequence[float]
    values: Sequence[float]
    exponent: float


def draw_growth(panels: Mapping[str, Mapping[str, Mapping[str, Line]]], path: Path, *, title: str) -> None:
    """Draw a column per sweep and a row per quantity: `panels[sweep][quantity][arm]`."""
    quantities = list(dict.fromkeys(name for sweep in panels.values() for name in sweep))
    rows, columns = len(quantities), len(panels)
    size = (3.6 * columns, 3.2 * rows + 0.5)
    with picture(path, rows, columns, figsize=size, squeeze=False) as (figure, grid):
        for column, (sweep, found) in enumerate(panels.items()):
            for row, quantity in enumerate(quantities):
                axes = grid[row, column]
                for (name, line), colour in zip(found[quantity].items(), (OPTIMIZER, BACKWARD), strict=False):
                    label = f"{name}: size^{line.exponent:.2f}"
                    axes.plot(line.sizes, line.values, "o-", color=colour, markersize=4, linewidth=1.2, label=label)
                axes.set_xscale("log", base=2)
                axes.set_yscale("log")
                axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axes.yaxis.set_major_formatter("{x:g}")
                axes.yaxis.set_minor_locator(NullLocator())
                axes.set_xticks(line.sizes, [f"{size:g}" for size in line.sizes])
                axes.xaxis.set_minor_locator(NullLocator())
                axes.set_title(f"{quantity} by {sweep}", loc="left", fontsize=9)
                axes.grid(alpha=0.3)
                axes.legend(frameon=False, fontsize=8)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
