"""Price: what each byte, or each record, that goes out and comes back costs a step, learned step by step."""

from __future__ import annotations

LAST = 0.5  # weight of the last planned step in what is known: others may have run beside it


class Price:
    """Seconds of a step for each of what it counts.

    A watched step does more than a planned one, so that the cheapest of them tells. Where few go, each is dearer than
    among many, as caches are cold and nothing shares its cost: a planned step tells as much as it moves, beside the one
    that moved most. Else a plan that recomputes, and moves a little, would find moving as dear as it has made it.

    Attributes:
        each_s: 0 until a step has told.
    """

    def __init__(self) -> None:
        self.each_s = 0.0
        self._most = 0

    def learn(self, each_s: float, count: int, *, planned: bool) -> float:
        """Learn from a step, `planned` or watched, in which each of `count` cost so much; 0 if none went."""
        if not each_s:
            return self.each_s
        self._most = max(count, self._most)
        if not self.each_s:
            self.each_s = each_s
        elif planned:
            self.each_s += LAST * count / self._most * (each_s - self.each_s)
        else:
            self.each_s = min(each_s, self.each_s)
        return self.each_s
