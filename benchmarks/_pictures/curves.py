"""Curves: throughput against peak memory, a panel for each model; upper left is better."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from .pictures import BACKWARD, FORWARDED, OPTIMIZER, READ, WAIT, WRITE, picture


class Point(NamedTuple):
    """Where one arm lies: its kind ("plain", "peer", "ours", "auto" or "lossy"), peak in MiB and throughput."""

    name: str
    kind: str
    peak_mib: float
    per_second: float


_COLOURS = {"plain": OPTIMIZER, "peer": WAIT, "ours": READ, "auto": BACKWARD, "lossy": FORWARDED}
_LABELS = {
    "plain": "plain PyTorch",
    "peer": "{}",
    "ours": "tba {}",
    "auto": "tba auto, a budget each",
    "lossy": "tba {} (lossy)",
}
_MARKERS = ("o", "s", "^", "D", "v", "P")


def draw_curves(panels: Mapping[str, Mapping[float, Sequence[Point]]], path: Path, *, units: Mapping[str, str]) -> None:
    """Draw a panel per model; per batch size (as a multiple of the benchmark's own) one set of points, larger for more.

    The budgets of tier auto are joined by a line; each peer has a marker of its own in every panel.
    """
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    names = [point.name for sizes in panels.values() for points in sizes.values() for point in points]
    markers = dict(zip(dict.fromkeys(names), cycle(_MARKERS), strict=False))
    with picture(path, rows, columns, figsize=(5.2 * columns + 0.6, 4.3 * rows + 0.8), squeeze=False) as (figure, grid):
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for (title, sizes), axes in zip(panels.items(), grid.flat, strict=False):
            for scale, points in sizes.items():
                _draw(axes, points, markers, size=5.0 * scale**0.4)
            if len(panels) == 1:
                for point in (point for points in sizes.values() for point in points):
                    place = (point.peak_mib, point.per_second)
                    axes.annotate(point.name, place, xytext=(6, 3), textcoords="offset points", fontsize=7)
            axes.set_title(title, loc="left", fontsize=10)
            axes.set_xlabel("peak over idle, MiB")
            axes.set_ylabel(f"{units[title]} per second")
            axes.set_xlim(left=0)
            axes.grid(alpha=0.3)
        handles = {label: handle for axes in grid.flat for handle, label in zip(*_legend(axes), strict=True)}
        figure.legend(
            handles.values(), handles.keys(), frameon=False, fontsize=9, loc="outside lower center", ncols=1 + columns
        )
        figure.suptitle(_title(panels), x=0.01, ha="left", fontsize=11)


def _draw(axes: Any, points: Sequence[Point], markers: Mapping[str, str], *, size: float) -> None:
    auto = sorted((p.peak_mib, p.per_second) for p in points if p.kind == "auto")
    if auto:
        peaks, rates = zip(*auto, strict=True)
        axes.plot(peaks, rates, "-o", color=_COLOURS["auto"], linewidth=1.2, markersize=size, label=_LABELS["auto"])
    for point in points:
        if point.kind == "auto":
            continue
        label = _LABELS[point.kind].format(point.name)
        filled = None if point.kind in ("plain", "ours") else "white"
        axes.plot(
            [point.peak_mib],
            [point.per_second],
            markers[point.name],
            color=_COLOURS[point.kind],
            markerfacecolor=filled,
            markersize=size,
            label=label,
        )


def _legend(axes: Any) -> tuple[list[Any], list[str]]:
    return axes.get_legend_handles_labels()  # type: ignore[no-any-return]  # matplotlib's own types end here


def _title(panels: Mapping[str, Mapping[float, Sequence[Point]]]) -> str:
    scales = sorted({scale for sizes in panels.values() for scale in sizes})
    batches = ", ".join(f"x{scale:g}" for scale in scales)
    return f"Throughput against peak memory: the upper left is better\nbatch {batches}, by the size of the marks"


def draw_peaks(shares: Mapping[str, tuple[float, float]], path: Path, *, title: str) -> None:
    """Draw the activation peak of each model in MiB, plain beside offloaded: the figure of the paper."""
    with picture(path, figsize=(7, 4.2)) as (_, axes):
        for number, (plain, offloaded) in enumerate(shares.values()):
            axes.bar(number - 0.2, plain, 0.38, color=OPTIMIZER, label="plain" if not number else None)
            axes.bar(number + 0.2, offloaded, 0.38, color=WRITE, label="tba nvme" if not number else None)
            text = f"{offloaded / plain - 1:.0%}"
            axes.annotate(text, (number + 0.2, offloaded), xytext=(0, 3), textcoords="offset points", ha="center")
        axes.set_xticks(range(len(shares)), list(shares))
        axes.set_ylabel("peak over idle, MiB")
        axes.set_title(title, loc="left", fontsize=11)
        axes.grid(axis="y", alpha=0.3)
        axes.legend(frameon=False, fontsize=9)
