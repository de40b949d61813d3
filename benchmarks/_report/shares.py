"""Shares: where the cost of an offloaded step goes, from arms that have only a part of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from .bar import Bar, bar_table
from .ratios import doubt, ratios
from .results import Grid
from .steps import Measured

PLAIN, NVME = "plain", "offload nvme"
HOOKS, KEEP, INSTANT = "empty hooks", "keep", "instant store"
SMALL, HUGE = "bare I/O, 4 KiB pages", "bare I/O, huge pages"
EXACT, SAFE8 = "nvme, exact", "nvme, safe8"
_WALL_BARS = {"24x256": 1.045, "8x512": 1.025}
_PART_BARS = {"offload above I/O itself": 0.02, "codec: exact": 0.02, "codec: safe8": 0.02}


@dataclass(frozen=True)
class Share:
    """One part of the cost: the difference of two arms, less that of `beside` to plain, as a share of plain's step."""

    what: str
    more: str
    less: str
    beside: str = PLAIN


SHARES = (
    Share("hooks that do nothing", HOOKS, PLAIN),
    Share("recognition alone (tier keep)", KEEP, PLAIN),
    Share("the engine without I/O", INSTANT, PLAIN),
    Share("I/O itself, in huge pages", HUGE, PLAIN),
    Share("small pages on top of that", SMALL, HUGE),
    Share("where engine and I/O meet: offload - instant - I/O", NVME, INSTANT, beside=HUGE),
    Share("offload above I/O itself", NVME, HUGE),
    Share("codec: exact", EXACT, NVME),
    Share("codec: safe8", SAFE8, NVME),
)


def shares(arms: Mapping[str, Measured], clock: str) -> dict[str, list[float]]:
    """Compute each part, round by round, as a share of plain's "wall_s" or "cpu_s" in that round."""
    times = {name: ratios(getattr(arm, clock), getattr(arms[PLAIN], clock)) for name, arm in arms.items() if arm.wall_s}
    found = {}
    for share in SHARES:
        if share.more in times and share.less in times and share.beside in times:
            columns = zip(times[share.more], times[share.less], times[share.beside], strict=True)
            found[share.what] = [more - less - (beside - 1.0) for more, less, beside in columns]
    return found


def share_table(model: str, arms: Mapping[str, Measured]) -> Grid:
    """Make the table of all parts, by the clock on the wall and in CPU seconds."""
    wall, cpu = shares(arms, "wall_s"), shares(arms, "cpu_s")
    rows = [(what, _text(wall[what]), _text(cpu[what])) for what in wall]
    note = (
        "Differences between two arms of one round, as a share of plain's step: medians over "
        f"{len(arms[PLAIN].wall_s)} rounds; behind ± about 95 % confidence."
    )
    return Grid(f"Where the cost goes, {model}", ("part", "wall", "CPU"), rows, note)


def explain_bars(model: str, arms: Mapping[str, Measured]) -> list[Bar]:
    """The bars that the parts must keep; a model without limits of its own has its values only shown."""
    limited = model in _WALL_BARS
    bars = []
    for clock, name in (("wall_s", "wall"), ("cpu_s", "CPU")):
        found = shares(arms, clock)
        for what, limit in _PART_BARS.items():
            bars.append(_bar(f"{what}, {name}", found[what], limit if limited else None))
    wall = ratios(arms[NVME].wall_s, arms[PLAIN].wall_s)
    return [_bar("offload / plain, wall", wall, _WALL_BARS.get(model)), *bars]


def explain_tables(model: str, arms: Mapping[str, Measured]) -> list[Grid]:
    """Make the tables of the parts and of their bars."""
    return [share_table(model, arms), bar_table(explain_bars(model, arms), f"Bars of the parts, {model}")]


def _bar(what: str, values: Sequence[float], limit: float | None) -> Bar:
    return Bar(what=what, measured=median(values), limit=limit, spread=doubt(values), unit="x")


def _text(values: Sequence[float]) -> str:
    return f"{median(values):+.1%} ± {doubt(values):.1%}"
