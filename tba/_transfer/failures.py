"""Failures: transfers that failed: counted, reported once, and the errors that others raise for them.

A failed write is not an error: the tensor stays in memory, and the first one is a warning. A failed read is an error
for whoever needs the bytes. What the engine itself cancelled is neither (`Mover.closed`).

Must be called with the engine's lock held, except to make an error.
"""

from __future__ import annotations

from .._errors import ClosedError, StalledError, TransferError
from .._record.record import Record
from .._stats import Counters
from .._torch.user_frames import Notices

_HOW_LONG = "(TBA_IO_TIMEOUT sets how long to wait)"


class Failures:
    """Count of failed transfers, and the words for them.

    Attributes:
        in_step: those of this step.
    """

    def __init__(self, counters: Counters, timeout_s: float) -> None:
        self.in_step = 0
        self._counters = counters
        self._timeout_s = timeout_s
        self._notices = Notices()

    def end_step(self) -> None:
        self.in_step = 0

    # -- of writes -----------------------------------------------------------------------------------------------

    def no_room(self) -> None:
        """Writes in flight have stalled, so no other could be queued."""
        self._warn(f"no transfer has ended for {self._timeout_s:g} s; tensors stay in memory")

    def not_queued(self, error: BaseException) -> None:
        self._warn(f"a write could not be queued ({error}); tensors stay in memory")

    def not_written(self, record: Record, error: BaseException) -> None:
        self._warn(f"the write of {record.name()} failed ({error}); it stays in memory")

    def not_flushed(self, where: str) -> StalledError:
        """The error of a `flush` in which no write ends; `where`: what has stalled."""
        return StalledError(f"flush: no write has ended for {self._timeout_s:g} s; {where} has stalled {_HOW_LONG}")

    # -- of reads ------------------------------------------------------------------------------------------------

    def not_read(self, record: Record, error: BaseException) -> TransferError:
        """Count a failed read; return its error."""
        self._count()
        return self.unreadable(record, error)

    def unreadable(self, record: Record, error: BaseException) -> TransferError:
        return TransferError(f"{_sized(record)} could not be read back: {error}")

    def late(self, record: Record, error: BaseException | None = None) -> StalledError:
        """The error of a read that does not end; `error` of the store, if it says why."""
        if error is not None:
            return StalledError(f"{_sized(record)} was not read back: {error} {_HOW_LONG}")
        return StalledError(
            f"{_sized(record)} was not read back within {self._timeout_s:g} s; the device has stalled {_HOW_LONG}"
        )

    def closed(self, record: Record) -> ClosedError:
        return ClosedError(
            f"backward asked for {record.name()}, but its Offloader was closed and the stored bytes are gone; "
            "close it only after the last backward of its graphs"
        )

    def _warn(self, text: str) -> None:
        self._count()
        self._notices.say("failure", f"offloading: {text}")

    def _count(self) -> None:
        self.in_step += 1
        self._counters.errors += 1


def _sized(record: Record) -> str:
    return f"{record.name()} ({record.nbytes} bytes)"
