"""Graph plan: what becomes of what one compiled graph saves for its backward."""

from __future__ import annotations

from dataclasses import dataclass

from .._text import short, size


@dataclass(frozen=True, kw_only=True)
class GraphPlan:
    """What becomes of what one compiled graph saves. It is made once, when the graph is compiled.

    Attributes:
        budget_bytes: for what it saves; None where all moves that is worth it.
        whole_bytes: that it saves as the compiler splits it by itself.
        saved_bytes: that it saves as it is split now; backward computes the rest again.
        moved_bytes: that leave memory.
        peak_bytes: the most that what it saves and computes again holds in memory at once, as predicted.
        share: PyTorch's `activation_memory_budget` that it is split with.
    """

    budget_bytes: int | None
    whole_bytes: int
    saved_bytes: int
    moved_bytes: int
    peak_bytes: int
    share: float

    @property
    def recomputed_bytes(self) -> int:
        """What backward computes again."""
        return max(0, self.whole_bytes - self.saved_bytes)

    def __str__(self) -> str:
        budget = "" if self.budget_bytes is None else f" of memory_budget={short(self.budget_bytes)}"
        again = f", {short(self.recomputed_bytes)} recompute (activation_memory_budget={self.share:g})"
        return (
            f"{short(self.whole_bytes)} saved: {short(self.moved_bytes)} move{again if self.recomputed_bytes else ''}; "
            f"peak {short(self.peak_bytes)}{budget}"
        )

    def why_not_met(self) -> str | None:
        """Say that the budget is not met, if that is so."""
        if self.budget_bytes is None or self.peak_bytes <= self.budget_bytes:
            return None
        return (
            f"memory_budget={size(self.budget_bytes)}: what a compiled graph saves holds {size(self.peak_bytes)} at "
            "best, with all moved and recomputed that can be"
        )


def as_reason(plans: tuple[GraphPlan, ...]) -> str:
    """Say why hooks have no plan where graphs have their own."""
    if len(plans) == 1:
        return f"planned within the compiled graph: {plans[0]}"
    lines = (f"  graph {number}: {plan}" for number, plan in enumerate(plans))
    return "\n".join((f"planned within {len(plans)} compiled graphs", *lines))
