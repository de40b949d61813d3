"""Picture of a plan, drawn by matplotlib: memory over the predicted step, by what holds it, below the budget."""

from __future__ import annotations

import os
from collections.abc import Sequence

from .._text import check_picture, size
from .simulate import Moment, Timeline

_MIB = 1 << 20
# The Okabe-Ito palette, which every kind of colour vision can tell apart; the link's transfers as those they fill.
_LAYERS = (
    ("kept", "#0072B2", "kept_bytes"),
    ("on the way out", "#E69F00", "out_bytes"),
    ("read back", "#009E73", "back_bytes"),
    ("recomputed", "#CC79A7", "replayed_bytes"),
)
_LINK = {"write": "#E69F00", "read": "#009E73"}
_DISK = {"spill": "#E69F00", "fetch": "#009E73"}


def draw(found: Timeline, budget_bytes: int, measured_peak_bytes: int | None, path: str | os.PathLike[str]) -> None:
    """Draw the bytes that saved tensors hold over a simulated step, and what its link carries when.

    Args:
        found: the step.
        budget_bytes: a line.
        measured_peak_bytes: another; None for none.
        path: the file; its ending chooses the format.

    Raises:
        ConfigError: as `check_picture`.
        OSError: the file cannot be written.
    """
    check_picture(path, "a plan")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 4.6), layout="constrained")
    memory, link = figure.subplots(2, 1, sharex=True, height_ratios=(8, 1))
    at_s = [moment.at_s for moment in found.moments]
    stacks = [[getattr(moment, name) / _MIB for moment in found.moments] for _, _, name in _LAYERS]
    labels, colours = [label for label, _, _ in _LAYERS], [colour for _, colour, _ in _LAYERS]
    memory.stackplot(at_s, stacks, labels=labels, colors=colours, step="post")
    limit = f"budget {size(budget_bytes)}"
    memory.axhline(budget_bytes / _MIB, color="black", linewidth=1.2, linestyle="--", label=limit)
    if measured_peak_bytes is not None:
        text = f"measured peak {size(measured_peak_bytes)}"
        memory.axhline(measured_peak_bytes / _MIB, color="#D55E00", linewidth=1.2, linestyle=":", label=text)
    memory.axvline(found.turn_s, color="#555555", linewidth=0.8)
    memory.annotate(
        "backward",
        (found.turn_s, 1),
        (4, -4),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        va="top",
        fontsize=9,
        color="#555555",
    )
    memory.set_ylim(0, 1.12 * max(budget_bytes, _highest(found.moments)) / _MIB)
    memory.set_ylabel("saved tensors, MiB")
    memory.set_title("memory over the step, as planned", loc="left", fontsize=11)
    figure.legend(*memory.get_legend_handles_labels(), loc="outside lower left", ncols=6, frameon=False, fontsize=9)
    lanes = {"disk": _DISK, "link": _LINK} if found.spilled_bytes else {"link": _LINK}
    for lane, kinds in enumerate(lanes.values()):
        for kind, colour in kinds.items():
            spans = [(each.start_s, each.end_s - each.start_s) for each in found.transfers if each.kind == kind]
            link.broken_barh(spans, (lane, 1), color=colour, linewidth=0)
    link.set_yticks([lane + 0.5 for lane in range(len(lanes))], list(lanes))
    link.set_ylim(0, len(lanes))
    link.set_xlim(0, found.step_s)
    link.set_xlabel("seconds from the begin of the step")
    figure.savefig(path, dpi=130)


def _highest(moments: Sequence[Moment]) -> int:
    return max((moment.nbytes for moment in moments), default=1)
