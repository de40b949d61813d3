"""Pictures: the timeline of a step, step time against link rate, memory over a run; no display is needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from .._report.results import MIB
from .timeline import away_bytes, lanes, of_kind

# The Okabe-Ito palette: told apart by every kind of colour vision, and in print.
FORWARD, BACKWARD, OPTIMIZER = "#56B4E9", "#0072B2", "#999999"
WRITE, READ, WAIT, FORWARDED = "#E69F00", "#009E73", "#D55E00", "#CC79A7"


@contextmanager
def picture(path: Path, rows: int = 1, columns: int = 1, **options: Any) -> Iterator[tuple[Figure, Any]]:
    """A figure and its axes, saved at the end as a PNG."""
    figure, axes = pyplot.subplots(rows, columns, layout="constrained", **options)
    try:
        yield figure, axes
        figure.savefig(path, dpi=130)
    finally:
        pyplot.close(figure)


def draw_timeline(step: Mapping[str, Any], path: Path, *, title: str) -> None:
    """Draw one step: compute per block, each transfer and wait, and below them the bytes that are away."""
    writes, reads, waits = (of_kind(step["events"], kind) for kind in ("write", "read", "wait"))
    rows: list[str] = ["compute", "waits"]
    bars: list[tuple[int, float, float, str, float]] = []
    for number, (phase, _, start, end) in enumerate(step["spans"]):
        # Neighbouring blocks in two shades, so that their borders show.
        colour = {"forward": FORWARD, "backward": BACKWARD}.get(phase, OPTIMIZER)
        bars.append((0, start, end, colour, 1 - number % 2 * 0.35))
    bars += [(1, start, end, WAIT, 1.0) for _, start, end, _, _ in waits]
    for kind, events, colour in (("write", writes, WRITE), ("read", reads, READ)):
        chosen = lanes(events)
        first = len(rows)
        rows += [f"{kind} {lane + 1}" for lane in range(max(chosen, default=-1) + 1)]
        bars += [(first + lane, event[1], event[2], colour, 1.0) for event, lane in zip(events, chosen, strict=True)]

    heights = (0.36 * len(rows) + 0.5, 1.8)
    size = {"figsize": (13, sum(heights) + 1.2), "height_ratios": heights}
    with picture(path, 2, sharex=True, **size) as (_, (timeline, away)):
        for row, start, end, colour, alpha in bars:
            timeline.barh(row, end - start, left=start, height=0.74, color=colour, alpha=alpha, linewidth=0)
        forwarded = of_kind(step["events"], "forwarded")
        timeline.plot([event[1] for event in forwarded], [0.47] * len(forwarded), "^", color=FORWARDED, markersize=5)
        timeline.set_yticks(range(len(rows)), rows)
        timeline.set_ylim(len(rows) - 0.5, -0.6)
        timeline.set_title(title, loc="left", fontsize=11)
        for phase in ("forward", "backward"):  # a thin line where each ends
            until_s = max(end for kind, _, _, end in step["spans"] if kind == phase)
            for axes in (timeline, away):
                axes.axvline(until_s, color="black", linewidth=0.7, alpha=0.6)
        legend = {
            "forward, by block": FORWARD,
            "backward, by block": BACKWARD,
            "optimizer": OPTIMIZER,
            "write": WRITE,
            "read": READ,
            "backward waits": WAIT,
        }
        handles: list[Any] = [Patch(color=colour, label=label) for label, colour in legend.items()]
        handles.append(
            Line2D([], [], color=FORWARDED, marker="^", linestyle="none", label="still in memory: forwarded")
        )
        place = {"loc": "lower left", "bbox_to_anchor": (-0.01, 1.06)}
        timeline.legend(handles=handles, ncols=len(handles), frameon=False, fontsize=9, **place)

        at_s, sizes = away_bytes(step["events"], step["wall_s"])
        away.fill_between(at_s, [size / MIB for size in sizes], step="post", color=WRITE, alpha=0.35, linewidth=0)
        away.step(at_s, [size / MIB for size in sizes], where="post", color=WRITE, linewidth=1.2)
        away.set_ylabel("written, not yet\nread back, MiB")
        away.set_xlabel("seconds from the start of the step")
        away.set_ylim(bottom=0)
        away.set_xlim(0, step["wall_s"])
        away.grid(axis="y", alpha=0.3)


def draw_rates(
    points: Sequence[tuple[float, Mapping[str, Any]]],
    path: Path,
    *,
    plain: Mapping[str, Any],
    free: Mapping[str, Any],
    need: float,
    title: str,
) -> None:
    """Draw step time against the rate of the link: flat where compute hides the I/O, rising below the knee."""
    rates = [rate / 1e6 for rate, _ in points]
    low, high = min([*rates, need / 1e6]) / 1.5, max([*rates, need / 1e6]) * 1.5
    grid = [low * (high / low) ** (number / 100) for number in range(101)]
    alone = (free["written_bytes"] + free["read_bytes"]) / 1e6 / plain["wall_s"]
    with picture(path, figsize=(9, 5)) as (_, axes):
        axes.plot(
            grid, [alone / rate for rate in grid], color=WRITE, linewidth=1.2, label="I/O alone: bytes moved / rate"
        )
        axes.axhline(1.0, color=OPTIMIZER, linestyle="--", label="plain, nothing moved")
        axes.axhline(free["wall_ratio"], color=READ, linestyle=":", linewidth=2, label="offloaded, link not limited")
        axes.plot(
            rates, [row["wall_ratio"] for _, row in points], "o-", color=BACKWARD, label="offloaded, link limited"
        )
        label = f"I/O fits behind compute from {need / 1e6:,.0f} MB/s"
        axes.axvline(need / 1e6, color=WAIT, linewidth=1, label=label)
        axes.set_xscale("log")
        axes.set_xlim(low, high)
        axes.set_ylim(0, 1.2 * max(1.0, free["wall_ratio"], *(row["wall_ratio"] for _, row in points)))
        axes.set_xticks(rates, [f"{rate:,.0f}" for rate in rates])
        axes.minorticks_off()
        axes.set_xlabel("link, MB/s each way")
        axes.set_ylabel("step time / plain's")
        axes.set_title(f"{title}: step time against the link", loc="left", fontsize=11)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=9, loc="upper right")


def draw_memory(courses: Mapping[str, Sequence[Sequence[tuple[float, int]]]], path: Path, *, title: str) -> None:
    """Draw resident memory of every arm over its own training time (other arms' turns cut out): first steps, and all.

    `courses`: per arm, per step, `(seconds from the step's start, bytes over idle)`.
    """
    first_steps = min(3, *(len(steps) for steps in courses.values()))
    plain = iter((OPTIMIZER, WAIT, FORWARDED))
    colours = [READ if "offload" in name else next(plain) for name in courses]
    size = {"figsize": (13, 4.6), "width_ratios": (1, 1.6)}
    with picture(path, 1, 2, sharey=True, **size) as (figure, panels):
        for panel, last in zip(panels, (first_steps, None), strict=True):
            for (name, steps), colour in zip(courses.items(), colours, strict=True):
                at_s, sizes = _joined(steps[:last])
                panel.plot(at_s, sizes, color=colour, linewidth=1.1, label=f"{name}: peak {max(sizes):,.0f} MiB")
            panel.set_xlabel("seconds of this arm's training")
            panel.set_title(f"steps 1 to {last}" if last else "all steps", loc="left", fontsize=10)
            panel.set_xlim(left=0)
            panel.set_ylim(bottom=0)
            panel.grid(alpha=0.3)
        panels[0].set_ylabel("resident memory over idle, MiB")
        # Above the lines, which would else run through it.
        panels[1].set_ylim(top=1.35 * panels[1].get_ylim()[1])
        panels[1].legend(frameon=False, fontsize=9, loc="upper right")
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)


def _joined(steps: Sequence[Sequence[tuple[float, int]]]) -> tuple[list[float], list[float]]:
    """Put steps one after the other on one axis of seconds; sizes in MiB."""
    at_s: list[float] = []
    sizes: list[float] = []
    begun_s = 0.0
    for step in steps:
        at_s += [begun_s + at for at, _ in step]
        sizes += [nbytes / MIB for _, nbytes in step]
        begun_s += step[-1][0]
    return at_s, sizes
