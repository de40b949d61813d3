"""Picture of an audit, drawn by matplotlib: bytes of each class under each preset, and the gradient's error."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from compact import Saved

from .._text import check_picture, size
from .outcome import Outcome

# The Okabe-Ito palette, which every kind of colour vision can tell apart, with shades for related classes: attention
# green, norms yellow and orange, greys for classes that no preset touches.
_COLOURS = {
    Saved.LINEAR_INPUT: "#0072B2",
    Saved.PRODUCT_FACTOR: "#56B4E9",
    Saved.ACTIVATION_INPUT: "#CC79A7",
    Saved.NORM_INPUT: "#E69F00",
    Saved.NORM_STATISTICS: "#8A5F00",
    Saved.ATTENTION: "#009E73",
    Saved.ATTENTION_STATISTICS: "#00593F",
    Saved.PROBABILITIES: "#D55E00",
    Saved.MASK: "#F0E442",
    Saved.INDEX: "#555555",
    Saved.UNKNOWN: "#BBBBBB",
}
_WHOLE, _WORST = "#0072B2", "#D55E00"


def draw(before_bytes: Mapping[Saved, int], outcomes: Mapping[str, Outcome], path: str | os.PathLike[str]) -> None:
    """Draw a bar of bytes for each preset, with a color for each class; next to it the error on a logarithmic scale.

    Args:
        before_bytes: what plain PyTorch keeps, by class of saved tensor.
        outcomes: by name of the preset.
        path: the file; its ending chooses the format.

    Raises:
        ConfigError: as `check_picture`.
        OSError: the file cannot be written.
    """
    check_picture(path, "an audit")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.5, 2.1 + 0.62 * (1 + len(outcomes))), layout="constrained")
    bytes_axes, error_axes = figure.subplots(1, 2, sharey=True, width_ratios=(1.7, 1))
    _draw_bytes(bytes_axes, {"plain": before_bytes, **{name: o.after_bytes for name, o in outcomes.items()}})
    _draw_errors(error_axes, list(outcomes.values()))
    for axes in (bytes_axes, error_axes):
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    handles, labels = bytes_axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=6, frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)


def _draw_bytes(axes: Any, bars: Mapping[str, Mapping[Saved, int]]) -> None:
    totals = [sum(nbytes.values()) for nbytes in bars.values()]
    left = [0.0] * len(bars)
    for kind, colour in _COLOURS.items():
        widths = [nbytes.get(kind, 0) / totals[0] for nbytes in bars.values()]
        if any(widths):
            label = kind.value.replace("_", " ")
            axes.barh(range(len(bars)), widths, left=left, height=0.66, color=colour, label=label, linewidth=0)
            left = [start + width for start, width in zip(left, widths, strict=True)]
    for row, total in enumerate(totals):
        share = f"{size(total)}  ({total / totals[0]:.0%})" if row else size(total)
        axes.annotate(share, (total / totals[0], row), (5, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_xlim(0, 1.17 * max(totals) / totals[0])
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.set_yticks(range(len(bars)), bars)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xlabel("kept from forward to backward, as a share of what plain PyTorch keeps; without weights")
    axes.set_title("saved tensors, by the kind of operator that saved them", loc="left", fontsize=11)


def _draw_errors(axes: Any, outcomes: list[Outcome]) -> None:
    drawn: list[float] = []
    for marker, colour, label, name in (
        ("o", _WHOLE, "all parameters as one vector", "relative_error"),
        ("D", _WORST, "the worst parameter", "worst_error"),
    ):
        points = [(getattr(outcome, name), row) for row, outcome in enumerate(outcomes, 1)]
        points = [(error, row) for error, row in points if 0 < error < math.inf]
        drawn += [error for error, _ in points]
        axes.plot([at for at, _ in points], [row for _, row in points], marker, color=colour, markersize=7, label=label)
    for row, outcome in enumerate(outcomes, 1):
        text = f"cosine {outcome.cosine:.6f}" if math.isfinite(outcome.relative_error) else "not finite"
        text = text if outcome.relative_error else "equal bit for bit"
        axes.text(0.98, row, text, ha="right", va="center", fontsize=9, transform=axes.get_yaxis_transform())
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
    axes.set_xscale("log")
    axes.set_xlim(min(drawn, default=1e-3) / 2, max(drawn, default=1.0) * 30)  # room for the texts on the right
    axes.set_xlabel("|gradient - plain| / |plain|")
    axes.set_title("error of the gradient", loc="left", fontsize=11)
    axes.legend(facecolor="white", edgecolor="none", framealpha=1, fontsize=9, loc="upper right")
