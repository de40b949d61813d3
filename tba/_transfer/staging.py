"""Staging: how many bytes are on their way to a tier, and the waiting that keeps them below a cap.

Guarantees: bytes in flight never exceed the cap, except by one tensor that is larger than the cap on its own; a wait
ends when a transfer ends, or reports a stall once no transfer has ended for the timeout. A wait for room after that
reports the stall at once, until a transfer ends: a disk that hangs delays a step by one timeout, not by one for each
tensor. While a device is waited for, nothing has stalled, however long that takes.

`condition` shares the engine's lock: waiting releases it, so that workers can land their transfers. `catch_up` lands
what had ended before, and tells whether a device is waited for. A worker that ends a transfer later sees `waiters` and
takes the lock. It does not insist, as another thread may hold the lock and wait for this very worker: a wait then lands
for itself, a moment later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from io_backends import interrupts

_PERIOD_S = 0.05  # how often a wait looks for what a worker could not land
DEVICE_PERIOD_S = 0.0005  # how often it asks a device, which wakes nobody
_PATIENCE_S = 0.01


class Staging:
    """Accounting of transfers in flight. All methods want the lock of `condition` held.

    Attributes:
        count: of transfers in flight.
        bytes: of those whose source is still in memory; of a device's, what the device itself still holds.
        host_bytes: of those of a device that have been copied to host memory, at most `host_cap_bytes` (None: no cap).
        peak_bytes: the most that `bytes` has been.
    """

    def __init__(
        self,
        condition: threading.Condition,
        timeout_s: float,
        catch_up: Callable[[], bool] = lambda: False,
        host_cap_bytes: int | None = None,
    ) -> None:
        self._condition = condition
        self._host_cap_bytes = self._first_cap_bytes = host_cap_bytes
        self._timeout_s = timeout_s
        self._catch_up = catch_up
        self.waiters = 0
        self._landings = 0
        self._stalled_at = -1  # landings when a wait for room gave up
        self.bytes = self.host_bytes = 0
        self.count = 0
        self.peak_bytes = 0

    def resize(self, share: float) -> None:
        """Cap `host_bytes` at `share` times the first cap from now on."""
        if self._first_cap_bytes is not None:
            self._host_cap_bytes = int(share * self._first_cap_bytes)

    def wait_for_room(self, nbytes: int, cap_bytes: int, *, staged: bool = False) -> bool:
        """Wait until `has_room`; False when transfers have stalled, or for an interrupt."""

        def fits() -> bool:
            return self.has_room(nbytes, cap_bytes, staged=staged)

        if self._stalled_at == self._landings:
            self._catch_up()
            if self._stalled_at == self._landings:
                return fits()
        if self.wait_until(fits):
            return True
        if not interrupts.waiting():
            self._stalled_at = self._landings
        return False

    @property
    def patience_s(self) -> float:
        """Seconds that a worker which has ended a transfer should wait for the lock to land it."""
        return _PATIENCE_S if self.waiters else 0.0

    def has_room(self, nbytes: int, cap_bytes: int, *, staged: bool = False) -> bool:
        """Whether `nbytes` more fit below the cap, and below the host's too where they will be `staged` there."""
        if not self.count:
            return True
        if staged and self._host_cap_bytes is not None and self.host_bytes + self.bytes + nbytes > self._host_cap_bytes:
            return False
        return not self.bytes or self.bytes + nbytes <= cap_bytes

    def wait_until_idle(self) -> bool:
        """Wait until nothing is in flight; False when transfers have stalled, or for an interrupt."""
        return self.wait_until(lambda: not self.count)

    def depart(self, nbytes: int) -> None:
        """Count a transfer that was submitted."""
        self.count += 1
        self.bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def stage(self, nbytes: int) -> None:
        """Count a transfer whose bytes are in host memory now, and wake those who wait."""
        self.bytes -= nbytes
        self.host_bytes += nbytes
        self._moved()

    def land(self, nbytes: int, *, staged: bool = False) -> None:
        """Count a transfer that has ended or was cancelled, `staged` or not, and wake those who wait."""
        self.count -= 1
        if staged:
            self.host_bytes -= nbytes
        else:
            self.bytes -= nbytes
        self._moved()

    def _moved(self) -> None:
        self._landings += 1
        if self.waiters:
            self._condition.notify_all()

    def wait_until(self, satisfied: Callable[[], bool]) -> bool:
        """Wait until what transfers do has `satisfied` this; False when they have stalled, or for an interrupt."""
        if satisfied():
            return True
        self.waiters += 1  # before catching up: what ends from here on is landed by its worker
        try:
            on_device = self._catch_up()
            while not satisfied():
                landings = self._landings
                deadline_s = time.monotonic() + self._timeout_s
                while not satisfied() and self._landings == landings:
                    left_s = deadline_s - time.monotonic()
                    if interrupts.pending:
                        interrupts.look()
                    if interrupts.waiting() or (left_s <= 0 and not on_device):
                        return False
                    period_s = DEVICE_PERIOD_S if on_device else min(left_s, _PERIOD_S)
                    if not self._condition.wait(period_s):
                        waited_for_device, on_device = on_device, self._catch_up()
                        if waited_for_device and not on_device:
                            break  # from here on a store is waited for
            return True
        finally:
            self.waiters -= 1
