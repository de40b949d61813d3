"""Bars: the limits that a measurement must keep."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .results import Grid

_MEETS: Mapping[str, Callable[[float, float], bool]] = {"<=": operator.le, "<": operator.lt, ">=": operator.ge}


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A measured value and its limit; a value without a limit is only shown.

    Attributes:
        what: the name of the value.
        sign: how `measured` should compare with `limit`: "<=", "<" or ">=".
        unit: "x" for a ratio, "%" for a share; any other follows the number.
        spread: shown after the value; it decides nothing.
        noise: the amount by which the value may miss its limit.
    """

    what: str
    measured: float
    limit: float | None
    sign: str = "<="
    unit: str = "x"
    spread: float | None = None
    noise: float = 0.0

    @property
    def met(self) -> bool | None:
        """Whether the limit is kept; None without a limit."""
        if self.limit is None:
            return None
        noise = self.noise if self.sign == ">=" else -self.noise
        return _MEETS[self.sign](self.measured + noise, self.limit)

    def row(self) -> tuple[str, str, str, str]:
        """The cells of a table: name, limit, value, and whether the limit is kept."""
        limit = "-" if self.limit is None else f"{self.sign} {self._text(self.limit)}"
        measured = self._text(self.measured) + ("" if self.spread is None else f" ± {self.spread:.3f}")
        return self.what, limit, measured, {None: "-", True: "yes", False: "NO"}[self.met]

    def data(self) -> dict[str, Any]:
        """All fields, and `met`."""
        return {**asdict(self), "met": self.met}

    def _text(self, value: float) -> str:
        if self.unit == "%":
            return f"{value:.2%}"
        return f"{value:.1f} us" if self.unit == "us" else f"{value:.3f}{self.unit}"


def bar_table(bars: Sequence[Bar], title: str = "Bars", note: str = "") -> Grid:
    """The table of some bars."""
    return Grid(title, ("what", "bar", "measured", "met"), [bar.row() for bar in bars], note)
