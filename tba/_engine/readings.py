"""Readings: what the engine's parts show at this moment, added to what its counters have summed up.

Wants the engine's lock held.
"""

from __future__ import annotations

import time

from .._auto.planner import Planner
from .._stats import Counters, OffloadStats, Situation
from .._torch.foreign import Caches
from .._transfer.daily_allowance import projected_bytes_per_day
from .._transfer.mover import Mover
from .read_ahead import ReadAhead
from .steps import Steps


class Readings:
    """Reader of the parts that know how much there is now: graphs, memory, the store, caches of checkpointing."""

    def __init__(
        self,
        counters: Counters,
        mover: Mover,
        steps: Steps,
        read_ahead: ReadAhead,
        caches: Caches,
        planner: Planner | None,
    ) -> None:
        self._counters = counters
        self._mover = mover
        self._steps = steps
        self._read_ahead = read_ahead
        self._caches = caches
        self._planner = planner
        self._started_s = time.monotonic()

    def take(self) -> None:
        """Put into the counters what is not counted as it happens."""
        self.look_at_caches()
        self._counters.live_records = len(self._read_ahead.records)
        self._counters.resident_bytes = self._read_ahead.nbytes
        if self._planner is not None:
            self._counters.agreement_s = self._planner.agreement_s

    def look_at_caches(self) -> None:
        """Count what torch's selective checkpointing keeps, while it is there: a backward empties its caches."""
        self._counters.unseen_bytes += self._caches.count()

    def close_step(self) -> None:
        """Take everything, and end a step that nothing more can belong to."""
        self.take()
        self._steps.close()

    def as_counted(self, situation: Situation) -> OffloadStats:
        """Take a snapshot of what the counters have summed up, and change nothing."""
        since_s = time.monotonic() - self._started_s
        return self._counters.snapshot(
            file_bytes=self._mover.file_bytes(),
            last_step=self._steps.last,
            plain_peak_bytes=self._steps.footprint.plain_bytes,
            step_peak_bytes=self._steps.footprint.held_bytes,
            situation=situation,
            written_today_bytes=self._mover.allowance.written_today_bytes,
            projected_bytes_per_day=projected_bytes_per_day(self._counters.written_bytes, since_s),
        )
