"""Pictures: a step's timeline, step time against link rate, memory over a run. matplotlib, no display needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from .trace import away_bytes, lanes, of_kind

# The Okabe-Ito palette: told apart by every kind of colour vision, and in print.
FORWARD, BACKWARD, OPTIMIZER = "#56B4E9", "#0072B2", "#999999"
WRITE, READ, WAIT, FORWARDED = "#E69F00", "#009E73", "#D55E00", "#CC79A7"
_MIB = 1 << 20


def draw_timeline(step: Mapping[str, Any], path: Path, *, title: str) -> None:
    """Compute per block, each transfer and wait, and below the bytes that are away, over one step."""
    writes, reads, waits = (of_kind(step["events"], kind) for kind in ("write", "read", "wait"))
    rows: list[str] = ["compute", "waits"]
    bars: list[tuple[int, float, float, str]] = []
    for number, (phase, _, start, end) in enumerate(step["spans"]):
        bars.append((0, start, end, {"forward": FORWARD, "backward": BACKWARD}.get(phase, OPTIMIZER)))
        bars[-1] = (0, start, end, _shade(bars[-1][3], number % 2 == 1))
    bars += [(1, start, end, WAIT) for _, start, end, _, _ in waits]
    for kind, events, colour in (("write", writes, WRITE), ("read", reads, READ)):
        chosen = lanes(events)
        first = len(rows)
        rows += [f"{kind} {lane + 1}" for lane in range(max(chosen, default=-1) + 1)]
        bars += [(first + lane, event[1], event[2], colour) for event, lane in zip(events, chosen, strict=True)]

    heights = (0.36 * len(rows) + 0.5, 1.8)
    figure, (timeline, away) = pyplot.subplots(
        2, 1, figsize=(13, sum(heights) + 1.2), sharex=True, height_ratios=heights, layout="constrained"
    )
    for row, start, end, colour in bars:
        timeline.barh(row, end - start, left=start, height=0.74, color=colour, linewidth=0)
    forwarded = of_kind(step["events"], "forwarded")
    timeline.plot([event[1] for event in forwarded], [0.47] * len(forwarded), "^", color=FORWARDED, markersize=5)
    timeline.set_yticks(range(len(rows)), rows)
    timeline.set_ylim(len(rows) - 0.5, -0.6)
    timeline.set_title(title, loc="left", fontsize=11)
    _borders((timeline, away), step["spans"])
    legend = {
        "forward, by block": FORWARD,
        "backward, by block": BACKWARD,
        "optimizer": OPTIMIZER,
        "write": WRITE,
        "read": READ,
        "backward waits": WAIT,
    }
    handles: list[Any] = [Patch(color=colour, label=label) for label, colour in legend.items()]
    handles.append(Line2D([], [], color=FORWARDED, marker="^", linestyle="none", label="still in memory: forwarded"))
    place = {"loc": "lower left", "bbox_to_anchor": (-0.01, 1.06)}
    timeline.legend(handles=handles, ncols=len(handles), frameon=False, fontsize=9, **place)

    at_s, sizes = away_bytes(step["events"], step["wall_s"])
    away.fill_between(at_s, [size / _MIB for size in sizes], step="post", color=WRITE, alpha=0.35, linewidth=0)
    away.step(at_s, [size / _MIB for size in sizes], where="post", color=WRITE, linewidth=1.2)
    away.set_ylabel("written, not yet\nread back, MiB")
    away.set_xlabel("seconds from the start of the step")
    away.set_ylim(bottom=0)
    away.set_xlim(0, step["wall_s"])
    away.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def draw_rates(
    points: Sequence[tuple[float, Mapping[str, Any]]],
    path: Path,
    *,
    plain: Mapping[str, Any],
    free: Mapping[str, Any],
    need: float,
    title: str,
) -> None:
    """Step time of plain's against the rate of the link: flat where I/O hides, rising below the knee."""
    rates = [rate / 1e6 for rate, _ in points]
    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    low, high = min([*rates, need / 1e6]) / 1.5, max([*rates, need / 1e6]) * 1.5
    grid = [low * (high / low) ** (number / 100) for number in range(101)]
    alone = (free["written_bytes"] + free["read_bytes"]) / 1e6 / plain["wall_s"]
    axes.plot(grid, [alone / rate for rate in grid], color=WRITE, linewidth=1.2, label="I/O alone: bytes moved / rate")
    axes.axhline(1.0, color=OPTIMIZER, linestyle="--", label="plain, nothing moved")
    axes.axhline(free["wall_ratio"], color=READ, linestyle=":", linewidth=2, label="offloaded, link not limited")
    axes.plot(rates, [row["wall_ratio"] for _, row in points], "o-", color=BACKWARD, label="offloaded, link limited")
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
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def draw_memory(
    courses: Mapping[str, Sequence[Sequence[tuple[float, int]]]], path: Path, *, title: str, first_steps: int = 3
) -> None:
    """Resident memory of every arm over its own training time (other arms' turns cut out): the first steps, and all.

    `courses`: per arm, per step, `(seconds from the step's start, bytes over idle)`.
    """
    first_steps = min(first_steps, *(len(steps) for steps in courses.values()))
    figure, panels = pyplot.subplots(1, 2, figsize=(13, 4.6), sharey=True, width_ratios=(1, 1.6), layout="constrained")
    colours = dict(zip(courses, _arm_colours(courses), strict=True))
    for panel, last, heading in (
        (panels[0], first_steps, f"steps 1 to {first_steps}"),
        (panels[1], None, "all steps"),
    ):
        for name, steps in courses.items():
            at_s, sizes = _joined(steps[:last])
            peak = max(sizes)
            panel.plot(at_s, sizes, color=colours[name], linewidth=1.1, label=f"{name}: peak {peak:,.0f} MiB")
        panel.set_xlabel("seconds of this arm's training")
        panel.set_title(heading, loc="left", fontsize=10)
        panel.set_xlim(left=0)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("resident memory over idle, MiB")
    # Above the lines, which would else run through it.
    panels[1].set_ylim(top=1.35 * panels[1].get_ylim()[1])
    panels[1].legend(frameon=False, fontsize=9, loc="upper right")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _arm_colours(names: Iterable[str]) -> list[str]:
    """Plain arms in greys and reds, offloaded ones in green."""
    plain = iter((OPTIMIZER, WAIT, FORWARDED))
    return [READ if "offload" in name else next(plain) for name in names]


def _joined(steps: Sequence[Sequence[tuple[float, int]]]) -> tuple[list[float], list[float]]:
    """Steps one after the other on one axis of seconds; sizes in MiB."""
    at_s: list[float] = []
    sizes: list[float] = []
    begun_s = 0.0
    for step in steps:
        at_s += [begun_s + at for at, _ in step]
        sizes += [nbytes / _MIB for _, nbytes in step]
        begun_s += step[-1][0]
    return at_s, sizes


def _borders(all_axes: Sequence[Axes], spans: Sequence[Sequence[Any]]) -> None:
    """A thin line where forward ends and where backward ends."""
    for phase in ("forward", "backward"):
        ends = [end for kind, _, _, end in spans if kind == phase]
        for axes in all_axes:
            axes.axvline(max(ends), color="black", linewidth=0.7, alpha=0.6)


def _shade(colour: str, lighter: bool) -> str:
    """Neighbouring blocks in two shades, so that their borders show."""
    if not lighter:
        return colour
    parts = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (255 - part) * 0.35):02x}" for part in parts)
