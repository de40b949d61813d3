"""Tools for tests of the endurance allowance: clocks that are told the time, and a look into the file."""

from __future__ import annotations

import datetime
import os
import sqlite3
from contextlib import closing
from pathlib import Path

from tba._endurance import Allowance, counts_file

DAY_S = 86_400
NOON = datetime.datetime(2026, 3, 29, 12, tzinfo=datetime.UTC).timestamp()  # summer time began that night in Europe


class Clock:
    """The time of day, and seconds that only go forward; both move when told to."""

    def __init__(self, wall_s: float = NOON) -> None:
        self.wall_s, self.monotonic_s = wall_s, 100.0

    def wait(self, seconds: float) -> None:
        self.wall_s += seconds
        self.monotonic_s += seconds


def allowance(directory: Path, limit: int | None, clock: Clock) -> Allowance:
    return Allowance(limit, the_file(directory), wall_s=lambda: clock.wall_s, monotonic_s=lambda: clock.monotonic_s)


def the_file(directory: Path) -> Path:
    return directory / counts_file({}, "", os.uname().nodename).name


def counts(directory: Path) -> dict[str, int]:
    # To be written as well: a process killed in the midst of a transaction leaves it to be taken back by a reader.
    with closing(sqlite3.connect(f"file:{the_file(directory)}?mode=rw", uri=True)) as database:
        return dict(database.execute("SELECT day, bytes FROM written ORDER BY day"))
