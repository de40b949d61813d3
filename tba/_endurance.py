"""Endurance allowance: bytes written per day, counted across runs and processes, against what the drive should bear.

Guarantees:

1. What one process takes in a day, added to what the file says of that day, never passes the limit.
2. The file is whole at every moment: it is replaced at once, under a lock, and one that does not read is set aside.
3. `take` touches the file every `SYNC_S` at most and never waits for a process that has stopped with the lock held.
4. Without a limit nothing is counted and no file is looked at. A forked child counts for itself, from nothing.

Assumptions beneath them: what other processes took since the last look is not known yet, so together they may pass the
limit by what they take in `SYNC_S`; a process that is killed forgets as much.

Days are those of UTC: they all have 24 hours, and processes with different time zones agree on them. Each day has a
count of its own, so a clock set back neither gives the allowance anew nor takes it away.
"""

from __future__ import annotations

import atexit
import datetime
import json
import os
import platform
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ._errors import ClosedError
from ._frames import warn

SYNC_S = 5.0
# A holder of the lock needs about a millisecond. One that is stopped must not stop a training step.
_PATIENCE_S = 0.05
_PATIENCE_AT_CLOSE_S = 1.0
_RETRY_S = 0.001
_DAY_S = 86_400
_KEPT_DAYS = 32
# A rate over less time than this says nothing of a day.
_LEAST_RUN_S = 1.0
_FIRST_DAY = datetime.date(1970, 1, 1).toordinal()

Days = dict[int, int]  # days since 1970-01-01, bytes


class Broken(ValueError):
    """The text is not that of a file of counts."""


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
        self._started_s = monotonic_s()
        self._sync_at_s = self._started_s  # the first `take` looks at the file
        self._path: Path | None = None
        if limit_bytes is not None:
            place = Path(directory) if directory is not None else state_directory(os.environ, os.path.expanduser("~"))
            self._path = place and place / file_name(platform.node())
        self._lock = threading.Lock()
        self._closed = False
        self._days: Days = {}  # as last seen in the file
        self._pending: Days = {}  # taken by this process and not in the file yet
        self._taken_bytes = 0
        self._taken_today_bytes = 0
        self._day: int | None = None
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
                self._taken_bytes += nbytes
            else:
                self._say(
                    f"limit of {_iso(day)}",
                    f"{self._counted(day):,} of the {self.limit_bytes:,} bytes that may be written on {_iso(day)} "
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
            self._taken_bytes = max(0, self._taken_bytes - nbytes)
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

    @property
    def projected_bytes_per_day(self) -> int:
        """What a whole day would take at the rate of this object's life so far; 0 without a limit."""
        with self._lock:
            return projected_bytes_per_day(self._taken_bytes, self._monotonic_s() - self._started_s)

    def close(self) -> None:
        """Bring what was taken to the file. Idempotent."""
        self._closed = True
        with self._lock:
            if any(self._pending.values()):
                self._sync(_PATIENCE_AT_CLOSE_S)
        self._speak()

    # -- with the lock -------------------------------------------------------------------------------------------

    def _today(self) -> int:
        """The day, after a look at the file when one is due."""
        if self._monotonic_s() >= self._sync_at_s and not self._closed:
            self._sync(_PATIENCE_S)
        day = int(self._wall_s() // _DAY_S)
        if day != self._day:
            self._day = day
            self._taken_today_bytes = 0
        return day

    def _counted(self, day: int) -> int:
        return max(0, self._days.get(day, 0) + self._pending.get(day, 0))

    def _sync(self, patience_s: float) -> None:
        """Add what is pending to the file and learn what others added. Never raises: counts stay in memory instead."""
        self._sync_at_s = self._monotonic_s() + SYNC_S
        if self._path is None:
            self._say("no file", f"no home directory is known, {_IN_MEMORY}; set XDG_STATE_HOME to a directory")
            return
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _exclusive(self._path.with_suffix(".lock"), patience_s) as ours:
                if ours:  # else at the next sync
                    self._exchange(self._path)
        except OSError as error:
            self._say("no file", f"{str(self._path)!r} cannot be kept ({error.strerror}), {_IN_MEMORY}; {_REMEDY}")

    def _exchange(self, path: Path) -> None:
        """With the file's lock: the file and this process learn of each other. Raises OSError."""
        try:
            days = parse(path.read_bytes())
        except FileNotFoundError:
            days = self._days
        except Broken as error:
            aside = path.with_suffix(".broken")
            os.replace(path, aside)
            self._say(
                "broken", f"{str(path)!r} does not read ({error}); it is now {str(aside)!r}, counting begins anew"
            )
            days = self._days
        if any(self._pending.values()):
            days = merged(days, self._pending, int(self._wall_s() // _DAY_S))
            new = path.with_suffix(".new")
            # Not synced to the disk, as that may take long while the disk is busy: a power cut costs the last counts.
            new.write_bytes(render(days))
            os.replace(new, path)
            self._pending = {}
        self._days = days

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
        self._taken_bytes = self._taken_today_bytes = 0


_IN_MEMORY = "so bytes written are counted in memory and forgotten at the end"
_REMEDY = "make the directory writable or set XDG_STATE_HOME to one that is"


def state_directory(environment: Mapping[str, str], home: str) -> Path | None:
    """Where counts are kept across runs, by the XDG Base Directory Specification; None where no home is known."""
    state = environment.get("XDG_STATE_HOME", "")
    if os.path.isabs(state):  # the specification says to ignore relative ones
        return Path(state, "tba")
    return Path(home, ".local", "state", "tba") if os.path.isabs(home) else None


def file_name(host: str) -> str:
    """The file of one machine among several that share a home."""
    return f"written-{re.sub(r'[^A-Za-z0-9_-]', '_', host) or 'host'}.json"


def projected_bytes_per_day(nbytes: int, elapsed_s: float) -> int:
    """What a day would see at the rate of `nbytes` in `elapsed_s`; less than a second counts as one."""
    return int(nbytes / max(elapsed_s, _LEAST_RUN_S) * _DAY_S)


def parse(data: bytes) -> Days:
    """The counts in a file.

    Raises:
        Broken: it is not such a file.
    """
    try:
        days = json.loads(data)["bytes_written"]
        counts = {datetime.date.fromisoformat(day).toordinal() - _FIRST_DAY: count for day, count in days.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Broken(f"{type(error).__name__}: {error}") from error
    for count in counts.values():
        if type(count) is not int or count < 0:
            raise Broken(f"{count!r} is no count of bytes")
    return counts


def render(days: Days) -> bytes:
    """A file of these counts."""
    return json.dumps({"bytes_written": {_iso(day): days[day] for day in sorted(days)}}, indent=1).encode()


def merged(days: Days, added: Days, today: int) -> Days:
    """The counts with others added to them: the days nearest to today, as a clock may once have been far off."""
    total = {day: max(0, days.get(day, 0) + added.get(day, 0)) for day in days.keys() | added.keys()}
    return {day: total[day] for day in sorted(total, key=lambda day: abs(day - today))[:_KEPT_DAYS]}


def _iso(day: int) -> str:
    return datetime.date.fromordinal(day + _FIRST_DAY).isoformat()


@contextmanager
def _exclusive(path: Path, patience_s: float) -> Iterator[bool]:
    """Hold the lock of a file, made if missing; False where somebody else held it for all of `patience_s`."""
    import fcntl  # not on Windows, where nothing that counts is written

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline_s = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline_s:
                    yield False
                    return
                time.sleep(_RETRY_S)
        try:
            yield True
        finally:
            # Closing alone would not do: a child forked meanwhile has the same lock in its copy.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


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
