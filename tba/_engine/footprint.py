"""Footprint: what saved tensors of the last step held in memory at once, and would have held in plain PyTorch.

The ledger counts what is worth moving. All else that stays is added to both: small tensors, those of types that never
move. Where the hooks only count or follow a plan they do not see these; then it is as much as they last saw. A step in
which blocks are tried runs them twice, and one in which blocks recompute saves less of it than plain PyTorch.

Wants the engine's lock held.
"""

from __future__ import annotations

from .._auto.acted import Acted
from .._memory.ledger import Peaks
from .._plan import policy
from .._stats import Counters, difference

_UNWRITTEN = (policy.NOT_WRITTEN, policy.DECLINED)  # in memory, and no longer in the ledger
_IN_PLACE = (policy.TIER_KEEP, policy.IN_HOST)  # with a codec: records that become smaller in memory
_WITH_RECORDS = (policy.FITS, policy.DERIVED, *_UNWRITTEN)


class Footprint:
    """Peaks of the last step: of its largest micro-batch, if it has several.

    Attributes:
        plain_bytes: if nothing was moved, compressed or recomputed.
        held_bytes: as it was.
        planned: a plan moved or recomputed some of it.
        aside_bytes: of what was held, what cannot move.
    """

    def __init__(self, counters: Counters, *, compresses: bool) -> None:
        self.plain_bytes = self.held_bytes = 0
        self.planned = False
        self._counters = counters
        self._compresses = compresses
        self.aside_bytes = self._plain_aside_bytes = 0
        self._before = counters.snapshot()

    def end_micro_batch(self, peaks: Peaks, acted: Acted, *, light: bool, first: bool) -> None:
        """Add a micro-batch that has ended, the `first` of its step or another; `light`: it saw only what may move."""
        now = self._counters.snapshot()
        seen, self._before = difference(now, self._before), now
        kept = seen.kept_by_reason
        in_place = _IN_PLACE if self._compresses else ()
        if not (light or acted.tried):
            own = (*_WITH_RECORDS, *in_place, policy.USED_AT_ONCE)
            self.aside_bytes = sum(nbytes for reason, nbytes in kept.items() if reason not in (*own, policy.WHOLE))
            if not acted.recomputed:
                self._plain_aside_bytes = self.aside_bytes
        # The ledger counts these in a light step, which does not ask why a tensor stays.
        whole_bytes = 0 if light else kept.get(policy.WHOLE, 0)
        plain_bytes = peaks.plain_bytes + self._plain_aside_bytes + whole_bytes
        held_bytes = peaks.held_bytes + self.aside_bytes + whole_bytes
        held_bytes += sum(kept.get(reason, 0) for reason in _UNWRITTEN)
        if smaller := sum(kept.get(reason, 0) for reason in in_place):
            held_bytes += max(0, smaller - seen.encoded_bytes + seen.packed_bytes - seen.derived_bytes)
        held_bytes = min(held_bytes, plain_bytes)
        self.planned = acted.planned or (self.planned and not first)
        if first:
            self.plain_bytes, self.held_bytes = plain_bytes, held_bytes
        else:
            self.plain_bytes = max(self.plain_bytes, plain_bytes)
            self.held_bytes = max(self.held_bytes, held_bytes)
