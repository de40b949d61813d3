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
    """The arms of one model at one batch, and the units of peak and throughput."""

    points: Sequence[Point]
    peak_unit: str
    rate_unit: str


# By kind: color, label, and whether the marker is filled.
_STYLES = {
    "plain": (GREY, "plain PyTorch", True),
    "peer": (RED, "{}", False),
    "ours": (GREEN, "tba {}", True),
    "auto": (BLUE, "tba auto, one point per budget", True),
    "lossy": (PURPLE, "tba {} (lossy)", False),
}
_MARKERS = ("s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*", "d", "8")
_TITLE = "Throughput against peak memory: the upper left is better"


def draw_curves(panels: Mapping[str, Panel], path: Path) -> None:
    """Draw a panel for each model and batch.

    A line joins the budgets of tier auto; every other arm has the same marker in all panels.
    """
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    names = [p.name for panel in panels.values() for p in panel.points if p.kind not in ("auto", "plain")]
    markers = dict(zip(dict.fromkeys(names), cycle(_MARKERS), strict=False))
    handles: dict[str, Any] = {}
    with picture(path, rows, columns, figsize=(5.2 * columns + 0.6, 4.3 * rows + 0.8), squeeze=False) as (figure, grid):
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for (name, panel), axes in zip(panels.items(), grid.flat, strict=False):
            handles |= _draw(axes, panel.points, markers)
            if len(panels) == 1:
                for point in panel.points:
                    place = (point.peak, point.rate)
                    axes.annotate(point.name, place, xytext=(6, 3), textcoords="offset points", fontsize=7)
            axes.set_title(name, loc="left", fontsize=10)
            axes.set_xlabel(panel.peak_unit)
            axes.set_ylabel(panel.rate_unit)
            axes.set_xlim(left=0)
            axes.grid(alpha=0.3)
        figure.legend(
            handles.values(), handles.keys(), frameon=False, fontsize=9, loc="outside lower center", ncols=1 + columns
        )
        figure.suptitle(_TITLE, x=0.01, ha="left", fontsize=11)


def _draw(axes: Any, points: Sequence[Point], markers: Mapping[str, str]) -> dict[str, Any]:
    """Draw the points of a panel; return what the legend shows, by label."""
    auto = sorted((point.peak, point.rate) for point in points if point.kind == "auto")
    lines = [(point.kind, point.name, [(point.peak, point.rate)]) for point in points if point.kind != "auto"]
    handles = {}
    for kind, name, places in [*([("auto", "", auto)] if auto else []), *lines]:
        colour, label, filled = _STYLES[kind]
        [line] = axes.plot(
            *zip(*places, strict=True),
            linestyle="-" if kind == "auto" else "",
            linewidth=1.2,
            marker=markers.get(name, "o"),
            markersize=6.0,
            color=colour,
            markerfacecolor=None if filled else "white",
        )
        handles[label.format(name)] = line
    return handles
