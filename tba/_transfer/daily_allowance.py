"""Daily allowance: bytes that may be written per day, counted across runs and processes to spare the drive.

Guarantees:

1. The bytes that one process takes in a day, plus those the file has counted for that day, never exceed the limit.
2. The file is an SQLite database in a private directory of the user; no link is followed, nobody else can write to it.
3. `take` opens the file every `SYNC_S` at most, and hardly waits for a process that was stopped while it holds a lock.
4. Without a limit nothing is counted and no file is opened. A forked child starts counting from zero.

Assumptions: this process does not know the bytes that others took since it last opened the file, so together they may
exceed the limit by what they take in `SYNC_S`; a killed process forgets as much.

Two processes that add at once: SQLite's lock puts one after the other, and each adds a difference (`bytes + ?`), never
a total, so no order of the two loses a byte. One that finds the file locked keeps its difference for the next time.

Days are those of UTC: they all have 24 hours, and processes in different time zones agree on them. Each day has its own
count, so setting a clock back neither renews the allowance nor takes it away.
"""

from __future__ import annotations

import os
import platform
import re
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from io_backends import ForkAware

from .._errors import ClosedError
from .._torch.user_frames import Notices
from .scratch_paths import make_private

SYNC_S = 5.0
# A writer holds the file for about a millisecond. One that was stopped must not stop a training step here.
_PATIENCE_S = 0.05
_PATIENCE_AT_CLOSE_S = 1.0


class Allowance(ForkAware):
    """Counts the bytes that may still be written today. Thread-safe.

    Args:
        limit_bytes: physical bytes a day, the setting `max_write_bytes_per_day`; None: no limit, nothing is counted.
        file: the database with the counts; None: `counts_file` in the user's state directory.
        ranks: processes of one training that take from it.
    """

    def __init__(self, limit_bytes: int | None, file: Path | None = None, *, ranks: int = 1) -> None:
        self.limit_bytes = limit_bytes
        self._part, self._ranks = 1 / ranks, ranks
        self._file = file or counts_file(os.environ, os.path.expanduser("~"), platform.node())
        self._lock = threading.RLock()  # held while warning; a hook that shows warnings may read statistics
        self._closed = False
        # The day on which the file was last opened, and when it is due next: at the first `take`.
        self._day, self._sync_at_s = "", 0.0
        # Bytes by day: taken by this process, the part of these that is in the file, and the file's last known count.
        self._taken, self._added, self._in_file = Counter[str](), Counter[str](), Counter[str]()
        self._notices = Notices()
        self.heed_forks()

    def take(self, nbytes: int) -> bool:
        """Count `nbytes` about to be written, unless that would exceed the day's limit.

        Warns once a day when the limit is reached, and once if no file can be kept: counting goes on in memory.

        Returns:
            Whether they may be written.

        Raises:
            ClosedError: after `close`.
        """
        if self._closed:
            raise ClosedError("this allowance was closed with its Offloader; make a new one")
        if self.limit_bytes is None:
            return True
        with self._lock:
            day = self._today()
            if self._counted(day) + nbytes <= self.limit_bytes:
                self._taken[day] += nbytes
                return True
            self._notices.say(
                f"limit of {day}",
                f"endurance allowance: {self._counted(day):,} of the {self.limit_bytes:,} bytes that may be written "
                f"on {day} (UTC) have been written: until the next day tensors stay in memory; raise "
                "max_write_bytes_per_day (TBA_MAX_WRITE_BYTES_PER_DAY) or offload less",
            )
            return False

    def give_back(self, nbytes: int) -> None:
        """Uncount bytes that were taken and not written, because the write was cancelled before it started."""
        if self.limit_bytes is not None:
            with self._lock:
                day = self._today()
                # Bytes taken before midnight stay with the previous day.
                self._taken[day] -= min(nbytes, self._taken[day])

    @property
    def written_today_bytes(self) -> int:
        """Bytes taken today by the user's processes on this machine, as far as known; 0 without a limit."""
        if self.limit_bytes is None:
            return 0
        with self._lock:
            return self._counted(self._today())

    @property
    def left_bytes(self) -> int:
        """Bytes of what is left of the day that this process may count on: its part; 0 where there is no limit."""
        if self.limit_bytes is None:
            return 0
        return int(max(0, self.limit_bytes - self.written_today_bytes) * self._part)

    def resize(self, share: float) -> None:
        """Count on `share` times an equal part from now on. What may be taken does not depend on it."""
        self._part = share / self._ranks

    def close(self) -> None:
        """Add this process's bytes to the file. Idempotent."""
        self._closed = True
        with self._lock:
            if self._taken != self._added:
                self._sync(_PATIENCE_AT_CLOSE_S)

    def freeze(self, deadline_s: float) -> None:
        """At the interpreter's exit: add this process's bytes to the file."""
        self.close()

    def forget(self) -> None:
        """Forget the parent's bytes in a forked child: the parent adds them to the file."""
        self._lock = threading.RLock()  # another thread may have held it
        self._taken.clear()
        self._added.clear()

    def _today(self) -> str:
        """Return the day, after adding to the file if that is due."""
        day = time.strftime("%Y-%m-%d", time.gmtime(time.time()))
        due = day != self._day or time.monotonic() >= self._sync_at_s
        self._day = day
        if due and not self._closed:
            self._sync(_PATIENCE_S)
        return day

    def _counted(self, day: str) -> int:
        # Losing the file does not renew the allowance.
        return max(self._in_file[day] - self._added[day], 0) + self._taken[day]

    def _sync(self, patience_s: float) -> None:
        """Add this process's bytes to the file and read its count. If that fails, counts stay in memory."""
        self._sync_at_s = time.monotonic() + SYNC_S
        reason = _problem(self._file)
        if reason is None:
            pending = {day: nbytes - self._added[day] for day, nbytes in self._taken.items()}
            try:
                self._in_file[self._day] = _exchange(self._file, pending, self._day, patience_s)
                self._added = self._taken.copy()
                return
            except sqlite3.Error as error:
                if getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                    return  # locked: try again in `SYNC_S`
                reason = f"does not work ({error})"
        self._notices.say(
            "no file",
            f"endurance allowance: {str(self._file)!r} {reason}, so bytes written are counted in memory and forgotten "
            "at the end; remove it, or set XDG_STATE_HOME to a directory of yours",
        )


def counts_file(environment: Mapping[str, str], home: str, host: str) -> Path:
    """Path of the counts, by the XDG Base Directory Specification; relative if no home is known.

    The host's name is part of the file's, because machines often share homes.
    """
    state = environment.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):  # the specification says to ignore relative ones
        state = os.path.join(home, ".local", "state")
    return Path(state, "tba", f"written-{re.sub(r'[^A-Za-z0-9_-]', '_', host) or 'host'}.sqlite3")


def projected_bytes_per_day(nbytes: int, elapsed_s: float) -> int:
    """Extrapolate `nbytes` in `elapsed_s` to bytes per day; less than a second counts as one."""
    return int(nbytes / max(elapsed_s, 1.0) * 86_400)


def _exchange(path: Path, pending: Mapping[str, int], day: str, patience_s: float) -> int:
    """Add pending bytes to the file and return its count of `day`. Raises sqlite3.Error."""
    with closing(sqlite3.connect(path, timeout=patience_s)) as database, database:
        # Not synced, which may take long while the disk is busy: a power cut loses the last counts.
        database.execute("PRAGMA synchronous = OFF")
        database.execute("CREATE TABLE IF NOT EXISTS written (day TEXT PRIMARY KEY, bytes INTEGER NOT NULL)")
        database.executemany(
            "INSERT INTO written VALUES (:day, max(0, :added)) "
            "ON CONFLICT (day) DO UPDATE SET bytes = max(0, bytes + :added)",
            [{"day": day, "added": nbytes} for day, nbytes in pending.items() if nbytes],
        )
        found = database.execute("SELECT CAST(bytes AS INTEGER) FROM written WHERE day = ?", (day,)).fetchone()
    return int(found[0]) if found is not None else 0


def _problem(path: Path) -> str | None:
    """Make the file if it is missing; return why that fails, or None. SQLite's journal takes the file's mode."""
    if not path.is_absolute():
        return "cannot be kept: no home directory is known"
    if reason := make_private(path.parent):
        return f"cannot be kept: the directory {reason}"
    return make_private(path, directory=False)
