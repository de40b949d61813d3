"""Knee: step time and waiting against the bandwidth of the link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from .pictures import BACKWARD, OPTIMIZER, READ, WAIT, WRITE, picture

_TICKS = [lead * 10**power for power in range(6) for lead in (1, 2, 5)]  # MB/s


def draw_knee(
    lines: Mapping[str, Sequence[tuple[float, float, float]]],
    path: Path,
    *,
    marks: Mapping[str, float],
    title: str,
) -> None:
    """Draw a line per policy through (bytes per second, step / plain's, share waited), and marks at rates."""
    with picture(path, 1, 2, figsize=(12, 4.6)) as (figure, panels):
        for column, (axes, what) in enumerate(
            zip(panels, ("step time / plain's", "waited, share of the step"), strict=True)
        ):
            for (name, points), colour in zip(lines.items(), (BACKWARD, READ), strict=False):
                places = sorted((point[0] / 1e6, point[1 + column]) for point in points)
                rates, values = zip(*places, strict=True)
                axes.plot(rates, values, "o-", color=colour, markersize=4, linewidth=1.3, label=name)
            for (name, rate), colour in zip(marks.items(), (WAIT, WRITE, OPTIMIZER), strict=False):
                axes.axvline(
                    rate / 1e6, color=colour, linewidth=1.2, linestyle="--", label=f"{name}: {rate / 1e6:,.0f} MB/s"
                )
            axes.set_xscale("log")
            low, high = axes.get_xlim()
            ticks = [each for each in _TICKS if low <= each <= high]
            axes.set_xticks(ticks, [f"{each:,}" for each in ticks])
            axes.minorticks_off()
            axes.set_xlabel("link, MB/s each way")
            axes.set_ylabel(what)
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, frameon=False, fontsize=9, loc="outside lower center", ncols=len(labels))
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
