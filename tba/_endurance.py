"""Endurance allowance: bytes written per day, counted across runs and processes, against what the drive should bear.

Guarantees:

1. What one process takes in a day, added to what the file says of that day, never passes the limit.
2. The file is an SQLite database in a directory of the user's own; no link is followed and nobody else can write to it.
3. `take` touches the file every `SYNC_S` at most and hardly waits for a process that has stopped in the middle of it.
4. Without a limit nothing is counted and no file is looked at. A forked child counts for itself, from nothing.

Assumptions beneath them: what other processes took since the last look is not known yet, so together they may pass the
limit by what they take in `SYNC_S`; a process that is killed forgets as much.

Days are those of UTC: they all have 24 hours, and processes with different time zones agree on them. Each day has a
count of its own, so a clock set back neither gives the allowance anew nor takes it away.
"""

from __future__ import annotations

import atexit
import datetime
import os
import platform
import re
import sqlite3
import stat
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from ._errors import ClosedError
from ._storage_path import make_private, user_id
from ._torch.user_frames import warn

SYNC_S = 5.0
# Who writes to the file needs about a millisecond. One that is stopped must not stop a training step.
_PATIENCE_S = 0.05
_PATIENCE_AT_CLOSE_S = 1.0
_DAY_S = 86_400
# A rate over less time than this says nothing of a day.
_LEAST_RUN_S = 1.0
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_IN_MEMORY = "so bytes written are counted in memory and forgotten at the end"


class Allowance:
    """How much may still be written today. Thread-safe.

    Args:
        limit_bytes: physical bytes a day, the setting `max_write_bytes_per_day`; None: no limit, nothing is counted.
        directory: where the counts are kept; None: the user's state directory (`XDG_STATE_HOME`, else
            `~/.local/state`) and `tba` below it. The file bears the host's name, as homes are often shared by machines.
        wall_s, monotonic_s: clocks, replaced in tests.
    """

    def __init__(
        self,
        limit_bytes: int | None,
        directory: str | os.PathLike[str] | None = None,
        *,
        wall_s: Callable[[], float] = time.time,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit_bytes = limit_bytes
        self._wall_s = wall_s
        self._monotonic_s = monotonic_s
        self._sync_at_s = monotonic_s()  # the first `take` looks at the file
        self._path: Path | None = None
        if limit_bytes is not None:
            place = Path(directory) if directory is not None else state_directory(os.environ, os.path.expanduser("~"))
            self._path = place and place / file_name(platform.node())
        self._lock = threading.Lock()
        self._closed = False
        self._pending: dict[str, int] = {}  # by day: taken by this process and not in the file yet
        self._taken_today_bytes = 0
        self._day = ""
        self._in_file_bytes = 0  # of that day, as last seen
        self._unsaid: list[str] = []  # warnings, given when the lock is free: a filter may turn them into errors
        self._said: set[str] = set()
        _allowances.add(self)

    def take(self, nbytes: int) -> bool:
        """Count `nbytes` about to be written; False, and nothing is counted, where the day's limit would be passed.

        Warns once a day that the limit is reached, and once of a file that cannot be kept: counting goes on in memory.

        Raises:
            ClosedError: after `close`.
        """
        if self._closed:
            raise ClosedError("this allowance was closed with its Offloader; make a new one")
        if self.limit_bytes is None:
            return True
        with self._lock:
            day = self._today()
            granted = self._counted(day) + nbytes <= self.limit_bytes
            if granted:
                self._pending[day] = self._pending.get(day, 0) + nbytes
                self._taken_today_bytes += nbytes
            else:
                self._say(
                    f"limit of {day}",
                    f"{self._counted(day):,} of the {self.limit_bytes:,} bytes that may be written on {day} "
                    "(UTC) have been: until the next day tensors stay in memory; raise max_write_bytes_per_day "
                    "(TBA_MAX_WRITE_BYTES_PER_DAY) or offload less",
                )
        self._speak()
        return granted

    def give_back(self, nbytes: int) -> None:
        """Uncount bytes that were taken and not written: the write was cancelled before it started."""
        if self.limit_bytes is None:
            return
        with self._lock:
            day = self._today()
            # What was taken before midnight stays with the day before: today's count is of today's writes.
            nbytes = min(nbytes, self._taken_today_bytes)
            self._pending[day] = self._pending.get(day, 0) - nbytes
            self._taken_today_bytes -= nbytes
        self._speak()

    @property
    def written_today_bytes(self) -> int:
        """Bytes taken today, by every process of the user on this machine as far as is known; 0 without a limit."""
        if self.limit_bytes is None:
            return 0
        with self._lock:
            counted = self._counted(self._today())
        self._speak()
        return counted

    def close(self) -> None:
        """Bring what was taken to the file. Idempotent."""
        self._closed = True
        with self._lock:
            if any(self._pending.values()):
                self._sync(_PATIENCE_AT_CLOSE_S)
        self._speak()

    # -- with the lock -------------------------------------------------------------------------------------------

    def _today(self) -> str:
        """The day, after a look at the file when one is due."""
        day = datetime.datetime.fromtimestamp(self._wall_s(), datetime.UTC).date().isoformat()
        changed = day != self._day
        if changed:
            self._day, self._in_file_bytes, self._taken_today_bytes = day, 0, 0
        if (changed or self._monotonic_s() >= self._sync_at_s) and not self._closed:
            self._sync(_PATIENCE_S)
        return day

    def _counted(self, day: str) -> int:
        return max(0, self._in_file_bytes + self._pending.get(day, 0), self._taken_today_bytes)

    def _sync(self, patience_s: float) -> None:
        """Add what is pending to the file and learn what others added. Never raises: counts stay in memory instead."""
        self._sync_at_s = self._monotonic_s() + SYNC_S
        if self._path is None:
            self._say("no file", f"no home directory is known, {_IN_MEMORY}; set XDG_STATE_HOME to a directory")
            return
        try:
            reason = _make_private_file(self._path)
            if reason is None:
                self._in_file_bytes = _exchange(self._path, self._pending, self._day, patience_s)
                self._pending = {}
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _BUSY:
                return  # at the next look, then
            reason = f"does not work ({error})"
        if reason is not None:
            self._say(
                "no file",
                f"{str(self._path)!r} {reason}, {_IN_MEMORY}; remove it, or set XDG_STATE_HOME to a directory of yours",
            )

    def _say(self, key: str, text: str) -> None:
        if key not in self._said:
            self._said.add(key)
            self._unsaid.append(f"endurance allowance: {text}")

    # -- without it ----------------------------------------------------------------------------------------------

    def _speak(self) -> None:
        while self._unsaid:
            warn(self._unsaid.pop(0))

    def _after_fork(self) -> None:
        self._lock = threading.Lock()  # another thread may have held it
        self._pending = {}  # the parent brings it to the file
        self._taken_today_bytes = 0


def state_directory(environment: Mapping[str, str], home: str) -> Path | None:
    """Where counts are kept across runs, by the XDG Base Directory Specification; None where no home is known."""
    state = environment.get("XDG_STATE_HOME", "")
    if os.path.isabs(state):  # the specification says to ignore relative ones
        return Path(state, "tba")
    return Path(home, ".local", "state", "tba") if os.path.isabs(home) else None


def file_name(host: str) -> str:
    """The file of one machine among several that share a home."""
    return f"written-{re.sub(r'[^A-Za-z0-9_-]', '_', host) or 'host'}.sqlite3"


def projected_bytes_per_day(nbytes: int, elapsed_s: float) -> int:
    """What a day would see at the rate of `nbytes` in `elapsed_s`; less than a second counts as one."""
    return int(nbytes / max(elapsed_s, _LEAST_RUN_S) * _DAY_S)


def _exchange(path: Path, pending: Mapping[str, int], day: str, patience_s: float) -> int:
    """Add counts to the file; what it says of a day then. Raises sqlite3.Error."""
    with closing(sqlite3.connect(path, timeout=patience_s, isolation_level=None)) as database:
        # Not synced to the disk, as that may take long while the disk is busy: a power cut costs the last counts.
        database.execute("PRAGMA synchronous = OFF")
        database.execute("CREATE TABLE IF NOT EXISTS written (day TEXT PRIMARY KEY, bytes INTEGER NOT NULL)")
        if any(pending.values()):
            database.execute("BEGIN IMMEDIATE")
            database.executemany(
                "INSERT INTO written VALUES (?1, max(0, ?2)) "
                "ON CONFLICT (day) DO UPDATE SET bytes = max(0, bytes + ?2)",
                list(pending.items()),
            )
            database.execute("COMMIT")
        found: tuple[Any] | None = database.execute("SELECT bytes FROM written WHERE day = ?", (day,)).fetchone()
    if found is not None and type(found[0]) is not int:
        raise sqlite3.DatabaseError(f"{found[0]!r} is no count of bytes")
    return found[0] if found is not None else 0


def _make_private_file(path: Path) -> str | None:
    """Make the file if it is missing; why it cannot be kept there, if so. What SQLite puts beside it has its mode."""
    reason = make_private(path.parent)
    if reason is not None:
        return f"cannot be kept: the directory {reason}"
    try:
        with suppress(FileExistsError):
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o600))
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode):
            return "is a link or a directory, where a file was expected"
        if found.st_uid != user_id():
            return f"belongs to user {found.st_uid}"
        if found.st_mode & 0o077:
            path.chmod(0o600)
    except OSError as error:
        return f"cannot be kept ({error.strerror})"
    return None


# -- exit and fork -----------------------------------------------------------------------------------------------------

_allowances: weakref.WeakSet[Allowance] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for allowance in list(_allowances):
        allowance.close()


def _after_fork_in_child() -> None:
    for allowance in list(_allowances):
        allowance._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
