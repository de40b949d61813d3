"""Bars: what a measurement must reach, as pure functions of what the arms showed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._harness import median, median_ratio

if TYPE_CHECKING:
    from .step import Measured

# Peak over idle of the offloaded run, as a share of plain's: (as Python comes, same allocator, under mimalloc).
_MEMORY_BARS = {"24x256": (0.30, 0.35, 0.35), "8x512": (0.40, 0.50, 0.45)}
_WALL_BAR, _CPU_BAR, _WAIT_BAR = 1.05, 1.07, 0.01


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One line: the measured value should be at most `limit` (below it, where `strictly`); None: only shown."""

    what: str
    measured: float
    limit: float | None
    unit: str = "x"
    strictly: bool = False

    @property
    def met(self) -> bool | None:
        if self.limit is None:
            return None
        return self.measured < self.limit if self.strictly else self.measured <= self.limit

    def row(self) -> tuple[str, str, str, str]:
        sign = "<" if self.strictly else "<="
        limit = "-" if self.limit is None else f"{sign} {self._text(self.limit)}"
        return self.what, limit, self._text(self.measured), {None: "-", True: "yes", False: "NO"}[self.met]

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
    wall, cpu = median_ratio(offload.wall_s, plain.wall_s), median_ratio(offload.cpu_s, plain.cpu_s)
    against = median_ratio(offload.wall_s, checkpoint.wall_s)
    return [
        *bars,
        Bar(what="wall per step / plain, same allocator", measured=wall, limit=timing(_WALL_BAR)),
        Bar(what="CPU seconds per step / plain, same allocator", measured=cpu, limit=timing(_CPU_BAR)),
        Bar(what="backward's waiting", measured=median(offload.waited_share), limit=timing(_WAIT_BAR), unit="%"),
        Bar(what="peak / full checkpointing", measured=_memory(offload, checkpoint), limit=timing(1), strictly=True),
        Bar(what="wall / full checkpointing", measured=against, limit=timing(1), strictly=True),
    ]


def cuda_bars(arms: Mapping[str, Measured]) -> list[Bar]:
    """What the same questions give on a GPU; no bars are set there."""
    plain, checkpoint = arms["plain"], arms["checkpoint"]
    bars = []
    for name in ("offload nvme", "offload cpu"):
        arm = arms[name]
        bars += [
            Bar(what=f"{name}: peak over idle / plain", measured=_memory(arm, plain), limit=None),
            Bar(what=f"{name}: wall / plain", measured=median_ratio(arm.wall_s, plain.wall_s), limit=None),
            Bar(what=f"{name}: backward's waiting", measured=median(arm.waited_share), limit=None, unit="%"),
            Bar(what=f"{name}: peak / full checkpointing", measured=_memory(arm, checkpoint), limit=None),
            Bar(
                what=f"{name}: wall / full checkpointing",
                measured=median_ratio(arm.wall_s, checkpoint.wall_s),
                limit=None,
            ),
        ]
    return bars


def _memory(arm: Measured, other: Measured) -> float:
    return arm.peak_bytes / max(1, other.peak_bytes)
