"""Candidate: one way to split a graph, with the choice of what moves and what a step would take."""

from __future__ import annotations

from dataclasses import dataclass

from .._memory.limits import Limits
from .choice import Choice, Prices, choose, step_s
from .split import Split


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to split a graph.

    Attributes:
        split: the way.
        choice: of what moves.
        fits: whether the budget is met.
        computing_s: estimated seconds of a step in which nothing moves.
        step_s: those of one that moves what is chosen.
    """

    split: Split
    choice: Choice
    fits: bool
    computing_s: float
    step_s: float

    @staticmethod
    def of(split: Split, budget_bytes: int | None, limits: Limits, prices: Prices) -> Candidate:
        """Choose what moves, within limits and under a budget, if there is one."""
        choice = choose(split.lifetimes, budget_bytes, limits)
        flops = split.forward_flops, split.backward_flops
        return Candidate(
            split=split,
            choice=choice,
            fits=budget_bytes is None or choice.peak_bytes <= budget_bytes,
            computing_s=step_s(0, *flops, prices),
            step_s=step_s(sum(split.saved[number].nbytes for number in choice.moved), *flops, prices),
        )

    @property
    def rank(self) -> tuple[bool, float]:
        """Sorts the best first: those that fit by what a step takes, then the others by their peak."""
        return not self.fits, self.step_s if self.fits else self.choice.peak_bytes
