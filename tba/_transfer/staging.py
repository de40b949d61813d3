"""Staging: how many bytes are on their way to a tier, and the waiting that keeps them below a cap.

Guarantees: bytes in flight never exceed the cap, except by one tensor that is larger than the cap on its own; a wait
ends when a transfer ends, or reports a stall once no transfer has ended for the timeout. A wait for room after that
reports the stall at once, until a transfer ends: a disk that hangs delays a step by one timeout, not by one for each
tensor.

`condition` shares the engine's lock: waiting releases it, so that workers can land their transfers. `catch_up` lands
what had ended before; a worker that ends a transfer later sees `waiters` and takes the lock. It does not insist, as
another thread may hold the lock and wait for this very worker: a wait then lands for itself, a moment later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from io_backends import interrupts

_PERIOD_S = 0.05  # how often a wait looks for what a worker could not land
_PATIENCE_S = 0.01


class Staging:
    """Accounting of transfers in flight. All methods want the lock of `condition` held."""

    def __init__(
        self, condition: threading.Condition, timeout_s: float, catch_up: Callable[[], None] = lambda: None
    ) -> None:
        self._condition = condition
        self._timeout_s = timeout_s
        self._catch_up = catch_up
        self.waiters = 0
        self._landings = 0
        self._stalled_at = -1  # landings when a wait for room gave up
        self.bytes = 0
        self.count = 0
        self.peak_bytes = 0

    def wait_for_room(self, nbytes: int, cap_bytes: int) -> bool:
        """Wait until `nbytes` more fit below the cap; False when transfers have stalled, or for an interrupt."""

        def fits() -> bool:
            return self.has_room(nbytes, cap_bytes)

        if self._stalled_at == self._landings:
            self._catch_up()
            if self._stalled_at == self._landings:
                return fits()
        if self._wait(fits):
            return True
        if not interrupts.waiting():
            self._stalled_at = self._landings
        return False

    @property
    def patience_s(self) -> float:
        """Seconds that a worker which has ended a transfer should wait for the lock to land it."""
        return _PATIENCE_S if self.waiters else 0.0

    def has_room(self, nbytes: int, cap_bytes: int) -> bool:
        """Whether `nbytes` more fit below the cap."""
        return not self.count or self.bytes + nbytes <= cap_bytes

    def wait_until_idle(self) -> bool:
        """Wait until nothing is in flight; False when transfers have stalled, or for an interrupt."""
        return self._wait(lambda: not self.count)

    def depart(self, nbytes: int) -> None:
        """Count a transfer that was submitted."""
        self.count += 1
        self.bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def land(self, nbytes: int) -> None:
        """Count a transfer that has ended or was cancelled, and wake those who wait."""
        self.count -= 1
        self.bytes -= nbytes
        self._landings += 1
        if self.waiters:
            self._condition.notify_all()

    def _wait(self, satisfied: Callable[[], bool]) -> bool:
        if satisfied():
            return True
        self.waiters += 1  # before catching up: what ends from here on is landed by its worker
        try:
            self._catch_up()
            while not satisfied():
                landings = self._landings
                deadline_s = time.monotonic() + self._timeout_s
                while not satisfied() and self._landings == landings:
                    left_s = deadline_s - time.monotonic()
                    if interrupts.pending:
                        interrupts.look()
                    if left_s <= 0 or interrupts.waiting():
                        return False
                    if not self._condition.wait(min(left_s, _PERIOD_S)):
                        self._catch_up()
            return True
        finally:
            self.waiters -= 1
