"""Picture of an audit: the bytes of each class, plain and under each preset, and the gradient's error. matplotlib."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compact import Saved

from ._errors import ConfigError

if TYPE_CHECKING:
    from ._audit_report import Audit

# The Okabe-Ito palette, told apart by every kind of colour vision, with a light and a dark shade for its relatives:
# attention green, norms yellow and orange, greys for what no preset touches.
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
_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("bytes", 1))


def check_picture(path: str | os.PathLike[str]) -> None:
    """Whether a picture can be drawn there, before any time is spent on what it would show.

    Raises:
        ConfigError: matplotlib is not installed, does not know the path's ending, or there is no such directory.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise ConfigError(
            "a picture of an audit needs matplotlib, which is not installed; pip install 'tba-offload[plot]'"
        ) from None
    known = Figure().canvas.get_supported_filetypes()
    target = Path(path)
    if target.suffix[1:].lower() not in known:
        raise ConfigError(f"a picture was asked for as {str(target)!r}: let it end in .{', .'.join(sorted(known))}")
    if not target.parent.is_dir():
        raise ConfigError(
            f"a picture was asked for as {str(target)!r}, but there is no directory {target.parent}: make it"
        )


def draw(audit: Audit, path: str | os.PathLike[str]) -> None:
    """Bars of bytes, one a preset, each class a colour; beside them the gradient's errors on a logarithmic scale.

    Raises:
        ConfigError: as `check_picture`.
        OSError: the file cannot be written.
    """
    check_picture(path)
    from matplotlib.figure import Figure

    rows = 1 + len(audit.outcomes)
    figure = Figure(figsize=(12.5, 2.1 + 0.62 * rows), layout="constrained")
    bytes_axes, error_axes = figure.subplots(1, 2, sharey=True, width_ratios=(1.7, 1))
    _draw_bytes(bytes_axes, audit)
    _draw_errors(error_axes, audit)
    handles, labels = bytes_axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=6, frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)


def _draw_bytes(axes: Any, audit: Audit) -> None:
    bars = {"plain": audit.before_bytes, **{name: outcome.after_bytes for name, outcome in audit.outcomes.items()}}
    totals = [sum(nbytes.values()) for nbytes in bars.values()]
    unit, scale = next((unit, scale) for unit, scale in _UNITS if max(totals) >= scale or scale == 1)
    left = [0.0] * len(bars)
    for kind, colour in _COLOURS.items():
        widths = [nbytes.get(kind, 0) / scale for nbytes in bars.values()]
        if any(widths):
            label = kind.value.replace("_", " ")
            axes.barh(range(len(bars)), widths, left=left, height=0.66, color=colour, label=label, linewidth=0)
            left = [start + width for start, width in zip(left, widths, strict=True)]
    for row, total in enumerate(totals):
        share = f"{total / scale:,.1f}" + (f"  ({total / totals[0]:.0%})" if row else "")
        axes.annotate(share, (total / scale, row), (5, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_xlim(0, 1.17 * max(totals) / scale)
    axes.set_yticks(range(len(bars)), bars)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xlabel(f"{unit} kept from forward to backward, weights aside")
    axes.set_title("saved tensors, by who saved them", loc="left", fontsize=11)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def _draw_errors(axes: Any, audit: Audit) -> None:
    outcomes = list(audit.outcomes.values())
    drawn = [error for o in outcomes for error in (o.relative_error, o.worst_error) if 0 < error < math.inf]
    low, high = min(drawn, default=1e-3) / 2, max(drawn, default=1.0) * 15  # room for the texts at the right
    for row, outcome in enumerate(outcomes, 1):
        whole, worst = outcome.relative_error, outcome.worst_error
        finite = [(at, row) for at in (whole, worst) if 0 < at < math.inf]
        axes.plot(*zip(*finite, strict=True) if finite else ((), ()), color="#999999", linewidth=1.2, zorder=1)
        text = f"cosine {outcome.cosine:.6f}" if math.isfinite(whole) else "not finite"
        text = text if whole else "every bit the same"
        axes.annotate(
            text,
            (max((at for at, _ in finite), default=low), row),
            (9, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
    for marker, colour, label, errors in (
        ("o", _WHOLE, "all parameters as one vector", [outcome.relative_error for outcome in outcomes]),
        ("D", _WORST, "the worst parameter", [outcome.worst_error for outcome in outcomes]),
    ):
        points = [(error, row) for row, error in enumerate(errors, 1) if 0 < error < math.inf]
        axes.plot([at for at, _ in points], [row for _, row in points], marker, color=colour, markersize=7, label=label)
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.set_xlabel("|gradient - plain| / |plain|")
    axes.set_title("error of the gradient", loc="left", fontsize=11)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(facecolor="white", edgecolor="none", framealpha=1, fontsize=9, loc="upper right")
