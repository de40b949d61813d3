"""The leaving picture: by the number of drives, what can leave a card's memory, and how long the drives then last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .pictures import BACKWARD, FORWARD, FORWARDED, OPTIMIZER, READ, WAIT, WRITE, picture

_DAYS = (30, 60, 90, 180, 365, 730, 1460, 2920)
_COLOURS = (FORWARDED, WRITE, OPTIMIZER, FORWARD, BACKWARD, WAIT, READ)


def draw_leaving(rows: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Draw a line per card; the host's memory, which does not wear, stands at the right of the drives."""
    with picture(path, 1, 2, figsize=(13, 4.8)) as (figure, (shares, days)):
        for row, colour in zip(rows, _COLOURS, strict=False):
            places, leaves = list(row["leaves"]), list(row["leaves"].values())
            line = {"color": colour, "marker": "o", "markersize": 4, "linewidth": 1.4}
            shares.plot(places, [100 * each["share"] for each in leaves], label=f"{row['card']}, {row['link']}", **line)
            worn = [(place, 365 * each["years"]) for place, each in row["leaves"].items() if each["years"] is not None]
            days.plot([place for place, _ in worn], [life for _, life in worn], **line)
        shares.set_ylabel("saved bytes that can leave, %")
        shares.set_xlabel("drives of the card's own, or the host's memory")
        shares.set_ylim(bottom=0)
        days.set_ylabel("days until the rated endurance is used up")
        days.set_xlabel("drives of the card's own")
        days.set_yscale("log")
        low, high = days.get_ylim()
        days.set_yticks(
            [each for each in _DAYS if low < each < high], labels=[f"{e:,}" for e in _DAYS if low < e < high]
        )
        days.minorticks_off()
        for axes in (shares, days):
            axes.grid(alpha=0.3)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        figure.legend(frameon=False, fontsize=9, loc="outside lower center", ncols=len(rows))
