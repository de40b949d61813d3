"""Pictures: a step's timeline, step time against link rate, memory over a run. matplotlib, no display needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from ._trace import lanes, of_kind

# The Okabe-Ito palette: told apart by every kind of colour vision, and in print.
FORWARD, BACKWARD, OPTIMIZER = "#56B4E9", "#0072B2", "#999999"
WRITE, READ, WAIT, FORWARDED = "#E69F00", "#009E73", "#D55E00", "#CC79A7"
_MIB = 1 << 20


def draw_timeline(step: Mapping[str, Any], path: Path, *, title: str) -> None:
    """Compute per block, each transfer and wait, and memory below, over one step."""
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

    heights = (0.36 * len(rows) + 0.5, 2.0)
    figure, (timeline, memory) = pyplot.subplots(
        2, 1, figsize=(13, sum(heights) + 1.2), sharex=True, height_ratios=heights, layout="constrained"
    )
    for row, start, end, colour in bars:
        timeline.barh(row, end - start, left=start, height=0.74, color=colour, linewidth=0)
    forwarded = of_kind(step["events"], "forwarded")
    timeline.plot([event[1] for event in forwarded], [0.47] * len(forwarded), "^", color=FORWARDED, markersize=5)
    timeline.set_yticks(range(len(rows)), rows)
    timeline.set_ylim(len(rows) - 0.5, -0.6)
    timeline.set_title(title, loc="left", fontsize=11)
    _borders((timeline, memory), step["spans"])
    legend = {
        "forward, by block": FORWARD,
        "backward, by block": BACKWARD,
        "optimizer": OPTIMIZER,
        "write": WRITE,
        "read": READ,
        "backward waits": WAIT,
        "still in memory: forwarded": FORWARDED,
    }
    patches = [Patch(color=colour, label=label) for label, colour in legend.items()]
    timeline.legend(
        handles=patches, ncols=len(patches), loc="lower left", bbox_to_anchor=(-0.01, 1.06), frameon=False, fontsize=9
    )

    memory.fill_between(*_series(step["memory"]), color=BACKWARD, alpha=0.25, linewidth=0)
    memory.plot(*_series(step["memory"]), color=BACKWARD, linewidth=1.2)
    memory.set_ylabel("resident memory\nover idle, MiB")
    memory.set_xlabel("seconds from the start of the step")
    memory.set_ylim(bottom=0)
    memory.set_xlim(0, step["wall_s"])
    memory.grid(axis="y", alpha=0.3)
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
    """Step time against the rate of the link: flat where I/O hides, rising below the knee."""
    rates = [rate / 1e6 for rate, _ in points]
    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    axes.axhline(plain["wall_s"], color=OPTIMIZER, linestyle="--", label="plain, nothing moved")
    axes.axhline(free["wall_s"], color=READ, linestyle=":", linewidth=2, label="offloaded, link not limited")
    axes.plot(rates, [row["wall_s"] for _, row in points], "o-", color=BACKWARD, label="offloaded")
    low, high = min([*rates, need / 1e6]) / 1.5, max([*rates, need / 1e6]) * 1.5
    grid = [low * (high / low) ** (number / 100) for number in range(101)]
    moved = (free["written_bytes"] + free["read_bytes"]) / 1e6
    axes.plot(
        grid,
        [moved / rate for rate in grid],
        color=WRITE,
        linewidth=1,
        label="bytes moved / rate: nothing hidden but I/O",
    )
    axes.axvline(need / 1e6, color=WAIT, linewidth=1, label=f"I/O fits behind compute from {need / 1e6:,.0f} MB/s")
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(0, 1.15 * max(row["wall_s"] for row in (*[row for _, row in points], plain, free)))
    axes.set_xticks(rates, [f"{rate:,.0f}" for rate in rates])
    axes.minorticks_off()
    axes.set_xlabel("link, MB/s each way")
    axes.set_ylabel("step, seconds")
    axes.set_title(f"{title}: step time against the link", loc="left", fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _series(samples: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    return [at for at, _ in samples], [max(0.0, nbytes / _MIB) for _, nbytes in samples]


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
