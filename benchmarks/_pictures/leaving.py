"""The leaving picture: by the number of drives, what can leave a card's memory, and how long the drives then last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .pictures import BACKWARD, FORWARD, FORWARDED, OPTIMIZER, READ, WAIT, WRITE, picture

_COLOURS = (FORWARDED, WRITE, OPTIMIZER, FORWARD, BACKWARD, WAIT, READ)


def draw_leaving(rows: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Draw a line per card; the host's memory, which does not wear, stands at the right of the drives."""
    with picture(path, 1, 2, figsize=(13, 4.8)) as (figure, (shares, years)):
        for row, colour in zip(rows, _COLOURS, strict=False):
            places, leaves = list(row["leaves"]), list(row["leaves"].values())
            line = {"color": colour, "marker": "o", "markersize": 4, "linewidth": 1.4}
            shares.plot(places, [100 * each["share"] for each in leaves], label=f"{row['card']}, {row['link']}", **line)
            worn = [(place, each["years"]) for place, each in row["leaves"].items() if each["years"] is not None]
            years.plot([place for place, _ in worn], [life for _, life in worn], **line)
        shares.set_ylabel("saved bytes that can leave, %")
        shares.set_xlabel("drives of the card's own, or the host's memory")
        shares.set_ylim(bottom=0)
        years.set_ylabel("years of rated endurance, steps without a pause")
        years.set_xlabel("drives of the card's own")
        years.set_yscale("log")
        for axes in (shares, years):
            axes.grid(alpha=0.3)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        figure.legend(frameon=False, fontsize=9, loc="outside lower center", ncols=len(rows))
