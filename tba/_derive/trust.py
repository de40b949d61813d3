"""Trust: what is known of how a tensor is made again, at one place of the step."""

from __future__ import annotations

from collections.abc import Hashable

from .operators import Scalars

_ENOUGH = 2  # comparisons in full


class Trust:
    """What is known of the recipes of one signature at one place of the step.

    Attributes:
        signature: theirs.
        lost: one of them has given another tensor.
        scalars: that the last right one has found, as autograd does not save them.
        run_s: seconds that it took.
        compare_s: seconds that comparing its result took.
    """

    def __init__(self, signature: Hashable) -> None:
        self.signature = signature
        self.lost = False
        self.scalars: tuple[Scalars, ...] = ()
        self.run_s = self.compare_s = 0.0
        self._times = 0

    @property
    def enough(self) -> bool:
        """Whether so many were right that the next counts as right until it is used."""
        return self._times >= _ENOUGH

    def gain(self, scalars: tuple[Scalars, ...], run_s: float, compare_s: float) -> None:
        """Note a recipe that has given the right tensor."""
        self.scalars, self.run_s, self.compare_s = scalars, run_s, compare_s
        self._times += 1

    def lose(self) -> None:
        """Note that a recipe has given another tensor."""
        self.lost = True
