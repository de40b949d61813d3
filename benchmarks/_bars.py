"""Bars: what a measurement must reach, as pure functions of what the arms showed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._harness import doubt, median, ratios

if TYPE_CHECKING:
    from .step import Measured

# Peak over idle of the offloaded run, as a share of plain's: (as Python comes, same allocator, under mimalloc).
_MEMORY_BARS = {"24x256": (0.30, 0.35, 0.35), "8x512": (0.40, 0.50, 0.45)}
_WALL_BAR, _CPU_BAR, _WAIT_BAR = 1.05, 1.07, 0.01


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One line: the measured value should be at most `limit` (below it, where `strictly`); None: only shown.

    `spread` is shown beside the value and decides nothing.
    """

    what: str
    measured: float
    limit: float | None
    unit: str = "x"
    strictly: bool = False
    spread: float | None = None

    @property
    def met(self) -> bool | None:
        if self.limit is None:
            return None
        return self.measured < self.limit if self.strictly else self.measured <= self.limit

    def row(self) -> tuple[str, str, str, str]:
        sign = "<" if self.strictly else "<="
        limit = "-" if self.limit is None else f"{sign} {self._text(self.limit)}"
        measured = self._text(self.measured) + ("" if self.spread is None else f" ± {self.spread:.3f}")
        return self.what, limit, measured, {None: "-", True: "yes", False: "NO"}[self.met]

    def _text(self, value: float) -> str:
        if self.unit == "%":
            return f"{value:.2%}"
        return f"{value:.1f} us" if self.unit == "us" else f"{value:.3f}{self.unit}"


def cpu_bars(model: str, arms: Mapping[str, Measured]) -> list[Bar]:
    """The bars of a CPU step; a model the table does not know has its values shown without a bar."""
    as_is, plain, offload = arms["plain, as Python comes"], arms["plain"], arms["offload nvme"]
    checkpoint, mimalloc = arms["checkpoint"], arms.get("offload nvme, mimalloc")
    known = _MEMORY_BARS.get(model)
    limits: tuple[float | None, ...] = known or (None, None, None)

    def timing(limit: float) -> float | None:
        return limit if known else None

    bars = [
        Bar(what="peak over idle / plain as Python comes", measured=_memory(offload, as_is), limit=limits[0]),
        Bar(what="peak over idle / plain, same allocator", measured=_memory(offload, plain), limit=limits[1]),
    ]
    if mimalloc is not None:
        what = "peak over idle under mimalloc / plain as Python comes"
        bars.append(Bar(what=what, measured=_memory(mimalloc, as_is), limit=limits[2]))
    wall, cpu = ratios(offload.wall_s, plain.wall_s), ratios(offload.cpu_s, plain.cpu_s)
    against = ratios(offload.wall_s, checkpoint.wall_s)
    return [
        *bars,
        _time("wall per step / plain, same allocator", wall, timing(_WALL_BAR)),
        _time("CPU seconds per step / plain, same allocator", cpu, timing(_CPU_BAR)),
        Bar(what="backward's waiting", measured=median(offload.waited_share), limit=timing(_WAIT_BAR), unit="%"),
        Bar(what="peak / full checkpointing", measured=_memory(offload, checkpoint), limit=timing(1), strictly=True),
        _time("wall / full checkpointing", against, timing(1), strictly=True),
    ]


def cuda_bars(arms: Mapping[str, Measured]) -> list[Bar]:
    """What the same questions give on a GPU; no bars are set there."""
    plain, checkpoint = arms["plain"], arms["checkpoint"]
    bars = []
    for name in ("offload nvme", "offload cpu"):
        arm = arms[name]
        bars += [
            Bar(what=f"{name}: peak over idle / plain", measured=_memory(arm, plain), limit=None),
            _time(f"{name}: wall / plain", ratios(arm.wall_s, plain.wall_s), None),
            Bar(what=f"{name}: backward's waiting", measured=median(arm.waited_share), limit=None, unit="%"),
            Bar(what=f"{name}: peak / full checkpointing", measured=_memory(arm, checkpoint), limit=None),
            _time(f"{name}: wall / full checkpointing", ratios(arm.wall_s, checkpoint.wall_s), None),
        ]
    return bars


def _time(what: str, found: Sequence[float], limit: float | None, *, strictly: bool = False) -> Bar:
    """Of ratios round by round, their median, and how far off it may be."""
    return Bar(what=what, measured=median(found), limit=limit, strictly=strictly, spread=doubt(found))


def _memory(arm: Measured, other: Measured) -> float:
    return arm.peak_bytes / max(1, other.peak_bytes)
