"""The Pareto picture: the validation loss of each arm against what it costs, a panel for each cost and task."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.ticker import FuncFormatter

from .pictures import BACKWARD, OPTIMIZER, READ, WAIT, picture

# Losses within this of plain's are drawn on a straight scale, those above on a logarithmic one.
_STRAIGHT_NATS = 0.01
# A label is about so wide, as a share of the widest point's place, and so high, in decades.
_LABEL_SHARE, _LABEL_HEIGHT = 0.12, 0.15
PLAIN = "plain"


class Panel(NamedTuple):
    """Points of some arms.

    Attributes:
        points: per arm its cost, as a share of plain's, and the gap of each seed in nats.
        cost: the name of the cost.
        title: what was trained.
        spread: spread of plain's seeds in nats, drawn as a band.
    """

    points: Mapping[str, tuple[float, Sequence[float]]]
    cost: str
    title: str
    spread: float


def draw_pareto(panels: Sequence[Panel], path: Path) -> None:
    """Draw two panels a row: a point per arm (its mean gap), a line through its seeds' gaps, the Pareto frontier."""
    rows = -(-len(panels) // 2)
    with picture(path, rows, 2, figsize=(13, 4.8 * rows), squeeze=False) as (figure, grid):
        for panel, axes in zip(panels, grid.flat, strict=False):
            _draw(panel, axes)
        handles = grid.flat[0].get_legend_handles_labels()
        # Outside, where no point can lie.
        figure.legend(*handles, frameon=False, fontsize=9, loc="outside lower right", ncols=2)


def _draw(panel: Panel, axes: Any) -> None:
    points = {PLAIN: (1.0, [0.0]), **panel.points}
    means = {name: (share, sum(gaps) / len(gaps)) for name, (share, gaps) in points.items()}
    drawn = {name: place for name, place in means.items() if math.isfinite(place[1])}
    front, below = frontier(drawn), labelled_below(drawn)
    axes.axhspan(-panel.spread, panel.spread, color=OPTIMIZER, alpha=0.18, linewidth=0, label="spread of plain's seeds")
    shares, gaps = zip(*(drawn[name] for name in front), strict=True)
    axes.step(shares, gaps, where="post", color=READ, linewidth=1.2, linestyle="--", label="no arm is better in both")
    for name, (share, gap) in drawn.items():
        colour = READ if name in front else WAIT if name.startswith("CompAct") else BACKWARD
        seeds = [value for value in points[name][1] if math.isfinite(value)]
        axes.plot([share] * 2, [min(seeds), max(seeds)], color=colour, linewidth=1.2)
        axes.plot([share], [gap], "o", color=colour, markersize=6)
        place = (7, -12) if name in below else (7, 5)
        axes.annotate(name, (share, gap), xytext=place, textcoords="offset points", fontsize=9)
    axes.set_yscale("symlog", linthresh=_STRAIGHT_NATS)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda nats, _: f"{nats:g}"))
    axes.set_xlim(0, 1.18 * max(share for share, _ in drawn.values()))
    axes.set_xlabel(panel.cost)
    axes.set_ylabel("validation loss above plain's, nats")
    axes.set_title(panel.title, loc="left", fontsize=11)
    axes.grid(alpha=0.3)


def labelled_below(points: Mapping[str, tuple[float, float]]) -> set[str]:
    """Choose the names to write below their points: one of two that would overlap, the lower where possible."""
    reach = _LABEL_SHARE * max((share for share, _ in points.values()), default=0.0)
    names = sorted(points, key=lambda name: points[name])
    below = set()
    for left, right in pairwise(names):
        (share, gap), (next_share, next_gap) = points[left], points[right]
        near = next_share - share < reach and abs(_height(next_gap) - _height(gap)) < _LABEL_HEIGHT
        if near and left not in below:
            below.add(left if gap <= next_gap else right)
    return below


def _height(nats: float) -> float:
    """Height of a gap on the scale, in decades above the straight part."""
    size = abs(nats) / _STRAIGHT_NATS
    return math.copysign(size if size <= 1 else 1 + math.log10(size), nats)


def frontier(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Find the points that no other point equals or beats in both values, in the order of the first value."""
    names = sorted(points, key=lambda name: points[name])
    front: list[str] = []
    for name in names:
        if not front or points[name][1] < points[front[-1]][1]:
            front.append(name)
    return front
