"""Pictures: memory over a run, and what all pictures share. Matplotlib is imported to draw, and needs no display."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .._report.results import MIB, CannotMeasure

# The Okabe-Ito palette: told apart by every kind of color vision, and in print.
BLUE, GREY, GREEN, RED, PURPLE = "#0072B2", "#999999", "#009E73", "#D55E00", "#CC79A7"


def check_pictures() -> None:
    """Check that pictures can be drawn, before anything is measured. Raises CannotMeasure."""
    if find_spec("matplotlib") is None:
        raise CannotMeasure("pictures need matplotlib, which is not installed; pip install 'tba-offload[plot]'")


@contextmanager
def picture(path: Path, rows: int = 1, columns: int = 1, **options: Any) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes, saved at the end as a PNG."""
    from matplotlib.figure import Figure

    size = {name: options.pop(name) for name in ("figsize",) if name in options}
    figure = Figure(layout="constrained", **size)
    yield figure, figure.subplots(rows, columns, **options)
    figure.savefig(path, dpi=130)


def draw_memory(courses: Mapping[str, Sequence[Sequence[tuple[float, int]]]], path: Path, *, title: str) -> None:
    """Draw resident memory of every arm over its own training time, without the turns of others: first steps, and all.

    `courses`: per arm, per step, `(seconds from the step's start, bytes over idle)`.
    """
    first_steps = min(3, *(len(steps) for steps in courses.values()))
    plain = iter((GREY, RED, PURPLE))
    colours = [GREEN if "offload" in name else next(plain) for name in courses]
    with picture(path, 1, 2, sharey=True, figsize=(13, 4.6), width_ratios=(1, 1.6)) as (figure, panels):
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
        panels[1].set_ylim(top=1.35 * panels[1].get_ylim()[1])  # room for the legend above the lines
        panels[1].legend(frameon=False, fontsize=9, loc="upper right")
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)


def _joined(steps: Sequence[Sequence[tuple[float, int]]]) -> tuple[list[float], list[float]]:
    """Concatenate steps on one axis of seconds; sizes in MiB."""
    at_s: list[float] = []
    sizes: list[float] = []
    begun_s = 0.0
    for step in steps:
        at_s += [begun_s + at for at, _ in step]
        sizes += [nbytes / MIB for _, nbytes in step]
        begun_s += step[-1][0]
    return at_s, sizes
