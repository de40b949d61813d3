"""Steps: where one training step ends and the next begins, and what each has moved.

A step begins with the first pack made outside backward after a backward has run, and ends where the next begins, or
where the context is left or the numbers are asked for once its backward has run. Around the forward alone, then, the
context is left in the middle of a step.
"""

from __future__ import annotations

import sys
import warnings

from torch.utils import checkpoint

from ._errors import OffloadWarning
from ._stats import Counters, OffloadStats, difference
from ._whole import Whole


class Steps:
    """Boundaries, the last step's statistics, what they teach, and a word to a user whose tier had nothing to do."""

    def __init__(self, tier: str, counters: Counters) -> None:
        self.backward_seen = False
        self.open = False
        self.last: OffloadStats | None = None
        self._tier = tier
        self._counters = counters
        self._at_start = counters.snapshot()
        self.whole = Whole(tier)
        self.told = tier in ("keep", "auto")  # tiers that may rightly move nothing

    @property
    def over(self) -> bool:
        """Whether the open step's backward has run, or begun."""
        return self.open and self.backward_seen

    def end(self, file_bytes: int) -> None:
        """The open step has ended."""
        self.open = self.backward_seen = False
        self._counters.steps += 1
        now = self._counters.snapshot(file_bytes=file_bytes)
        self.last, self._at_start = difference(now, self._at_start), now
        self.whole.end_step(self.last.offloaded_bytes, self.last.kept_bytes)
        self.tell_if_idle(self.last, forward_seen=True)

    def tell_if_idle(self, step: OffloadStats, *, forward_seen: bool) -> None:
        """Once: a tier that was asked for and moved nothing says why. What backward packs is nothing to judge by."""
        if self.told or (not forward_seen if step.saved_bytes else _inside_checkpoint()):
            return
        self.told = True
        if step.offloaded_bytes or step.errors:
            return
        if not step.saved_bytes:
            why = "autograd saved nothing (torch.no_grad, or no tensor that requires a gradient)"
        else:
            kept = ", ".join(f"{reason}: {nbytes:,} bytes" for reason, nbytes in step.kept_by_reason.items())
            why = f"of {step.saved_bytes:,} bytes saved {step.weight_bytes:,} are weights; kept: {kept or 'nothing'}"
        warnings.warn(f"tier={self._tier!r} moved nothing in its first step: {why}", OffloadWarning, stacklevel=5)


def _inside_checkpoint() -> bool:
    """Whether a checkpoint calls: the reentrant kind runs its forward under no_grad, and again in backward."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == checkpoint.__file__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
