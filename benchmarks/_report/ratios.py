"""Ratios within a round, and how far their median may be off."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """`over` divided by `under`, round by round: what drifts over a run cancels."""
    return [a / b for a, b in zip(over, under, strict=True)]


def median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Median of the ratios within a round; the median is robust against the bursts of a shared machine."""
    return statistics.median(ratios(over, under))


def spread(values: Sequence[float]) -> float:
    """Half of the interquartile range; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return (upper - lower) / 2


def doubt(values: Sequence[float]) -> float:
    """Half of the 95 % confidence interval of the median, as the notches of box plots show it.

    1.57 times the interquartile range over the root of the number of values (McGill, Tukey and Larsen, 1978).
    """
    return 2 * 1.57 * spread(values) / math.sqrt(len(values))
