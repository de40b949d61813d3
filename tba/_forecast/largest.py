"""Largest: the largest number for which a condition holds that holds for all smaller ones too."""

from __future__ import annotations

from collections.abc import Callable


def largest(holds: Callable[[int], bool], most: int) -> int:
    """Find it in 1 to `most`; 0 if it does not hold for 1. Asks for about 2 log2 numbers."""
    if not holds(1):
        return 0
    good, bad = 1, 2
    while bad <= most and holds(bad):
        good, bad = bad, 2 * bad
    bad = min(bad, most + 1)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if holds(middle) else (good, middle)
    return good
