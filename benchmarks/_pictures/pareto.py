"""The Pareto picture: the validation loss of each arm against the bytes it stores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from matplotlib.ticker import FuncFormatter

from .pictures import BACKWARD, OPTIMIZER, READ, WAIT, picture

# Losses within this of exact's are drawn on a straight scale, those above on a logarithmic one.
_STRAIGHT_NATS = 0.01
# A label is about so wide, as a share of the widest point's place, and so high, in decades.
_LABEL_SHARE, _LABEL_HEIGHT = 0.12, 0.15


def draw_pareto(
    points: Mapping[str, tuple[float, Sequence[float]]], path: Path, *, exact_share: float, spread: float, title: str
) -> None:
    """Draw a point per arm (its mean gap), a line through its seeds' gaps, and a staircase along the Pareto frontier.

    Args:
        points: per arm the stored share and the gap of each seed in nats.
        path: the PNG to write.
        exact_share: stored share of the exact arm, whose gap is 0.
        spread: spread of the exact arm's seeds in nats, drawn as a band.
        title: title of the picture.
    """
    means = {name: (share, sum(gaps) / len(gaps)) for name, (share, gaps) in points.items()}
    means["exact"] = (exact_share, 0.0)
    drawn = {name: place for name, place in means.items() if math.isfinite(place[1])}
    front = frontier(drawn)
    below = labelled_below(drawn)
    with picture(path, figsize=(9, 5.4)) as (figure, axes):
        axes.axhspan(-spread, spread, color=OPTIMIZER, alpha=0.18, linewidth=0, label="spread of exact's seeds")
        if front:
            shares, gaps = zip(*(drawn[name] for name in front), strict=True)
            axes.step(
                shares, gaps, where="post", color=READ, linewidth=1.2, linestyle="--", label="no arm is better in both"
            )
        for name, (share, gap) in drawn.items():
            colour = READ if name in front else WAIT if name.startswith("CompAct") else BACKWARD
            seeds = [value for value in points[name][1] if math.isfinite(value)] if name in points else [0.0]
            axes.plot([share] * 2, [min(seeds), max(seeds)], color=colour, linewidth=1.2)
            axes.plot([share], [gap], "o", color=colour, markersize=6)
            place = (7, -12) if name in below else (7, 5)
            axes.annotate(name, (share, gap), xytext=place, textcoords="offset points", fontsize=9)
        axes.set_yscale("symlog", linthresh=_STRAIGHT_NATS)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda nats, _: f"{nats:g}"))
        axes.set_xlim(0, 1.18 * max(share for share, _ in drawn.values()))
        axes.set_xlabel("stored between forward and backward, of what plain PyTorch stores")
        axes.set_ylabel("validation loss above exact's, nats per byte")
        axes.set_title(title, loc="left", fontsize=11)
        axes.grid(alpha=0.3)
        # Outside, where no point can lie.
        figure.legend(frameon=False, fontsize=9, loc="outside lower right", ncols=2)


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
