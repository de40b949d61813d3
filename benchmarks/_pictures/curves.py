"""Curves: throughput against peak memory, a panel for each model and batch; upper left is better."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from .pictures import BLUE, GREEN, GREY, PURPLE, RED, picture


class Point(NamedTuple):
    """Where one arm lies: its kind ("plain", "peer", "ours", "auto" or "lossy"), peak and throughput."""

    name: str
    kind: str
    peak: float
    rate: float


class Panel(NamedTuple):
    """The arms of one model at one batch, and what their peak and throughput are given in."""

    points: Sequence[Point]
    peak_unit: str
    rate_unit: str


_COLOURS = {"plain": GREY, "peer": RED, "ours": GREEN, "auto": BLUE, "lossy": PURPLE}
_LABELS = {
    "plain": "plain PyTorch",
    "peer": "{}",
    "ours": "tba {}",
    "auto": "tba auto, a budget each",
    "lossy": "tba {} (lossy)",
}
_MARKERS = ("s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*", "d", "8")
_SIZE = 6.0
TITLE = "Throughput against peak memory: the upper left is better"


def draw_curves(panels: Mapping[str, Panel], path: Path, *, title: str = TITLE) -> None:
    """Draw a panel for each model and batch.

    The budgets of tier auto are joined by a line; each other arm has a marker of its own in every panel.
    """
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    names = [p.name for panel in panels.values() for p in panel.points if p.kind not in ("auto", "plain")]
    markers = dict(zip(dict.fromkeys(names), cycle(_MARKERS), strict=False))
    with picture(path, rows, columns, figsize=(5.2 * columns + 0.6, 4.3 * rows + 0.8), squeeze=False) as (figure, grid):
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for (name, panel), axes in zip(panels.items(), grid.flat, strict=False):
            _draw(axes, panel.points, markers)
            if len(panels) == 1:
                for point in panel.points:
                    place = (point.peak, point.rate)
                    axes.annotate(point.name, place, xytext=(6, 3), textcoords="offset points", fontsize=7)
            axes.set_title(name, loc="left", fontsize=10)
            axes.set_xlabel(panel.peak_unit)
            axes.set_ylabel(panel.rate_unit)
            axes.set_xlim(left=0)
            axes.grid(alpha=0.3)
        handles = {label: handle for axes in grid.flat for handle, label in zip(*_legend(axes), strict=True)}
        figure.legend(
            handles.values(), handles.keys(), frameon=False, fontsize=9, loc="outside lower center", ncols=1 + columns
        )
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)


def _draw(axes: Any, points: Sequence[Point], markers: Mapping[str, str]) -> None:
    auto = sorted((point.peak, point.rate) for point in points if point.kind == "auto")
    if auto:
        peaks, rates = zip(*auto, strict=True)
        axes.plot(peaks, rates, "-o", color=_COLOURS["auto"], linewidth=1.2, markersize=_SIZE, label=_LABELS["auto"])
    for point in points:
        if point.kind == "auto":
            continue
        label = _LABELS[point.kind].format(point.name)
        filled = None if point.kind in ("plain", "ours") else "white"
        axes.plot(
            [point.peak],
            [point.rate],
            "o" if point.kind == "plain" else markers[point.name],
            color=_COLOURS[point.kind],
            markerfacecolor=filled,
            markersize=_SIZE,
            label=label,
        )


def _legend(axes: Any) -> tuple[list[Any], list[str]]:
    return axes.get_legend_handles_labels()  # type: ignore[no-any-return]  # matplotlib's own types end here
