"""Daily allowance: several users of one file at once, killed and forked ones too, against a model."""

from __future__ import annotations

import datetime
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.daily_allowance import DAY_S, Clock, allowance, clock_in_force, counts, the_file
from support.samples import examples
from tba import OffloadWarning
from tba._transfer import daily_allowance


@pytest.fixture(autouse=True)
def clock() -> Iterator[Clock]:
    with clock_in_force() as clock:
        yield clock


def test_many_threads_pass_no_limit(tmp_path: Path) -> None:
    taken = allowance(tmp_path, 1000)
    granted = Counter[bool]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        threads = [
            threading.Thread(target=lambda: granted.update([taken.take(3) for _ in range(200)])) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert granted == {True: 333, False: 800 - 333}
    taken.close()
    assert sum(counts(tmp_path).values()) == 999


def take_until_told(directory: Path, limit: int, takes: int, gate: int, told: int) -> None:
    """In a child: once the gate is shut, take, looking at the file each time, and tell how often it was granted."""
    daily_allowance.SYNC_S = 0.0
    taken = allowance(directory, limit)
    os.read(gate, 1)
    granted = sum(taken.take(3) for _ in range(takes))
    taken.close()
    os.write(told, granted.to_bytes(8, "big"))


def takers(directory: Path, limit: int, takes: int) -> tuple[list[int], int]:
    """Two children that take at the same time: their process ids, and where they tell what was granted."""
    (gate, shut), (results, told) = os.pipe(), os.pipe()
    children = []
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer Pythons warn of any fork beside threads
            children.append(os.fork())
            if children[-1] == 0:
                try:
                    os.close(shut)
                    take_until_told(directory, limit, takes, gate, told)
                finally:
                    os._exit(0)
    for descriptor in (gate, shut, told):
        os.close(descriptor)
    return children, results


def test_processes_at_once_lose_no_byte(tmp_path: Path) -> None:
    children, results = takers(tmp_path, 3 * 400, 300)
    with open(results, "rb") as file:
        told = file.read()
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    granted = [int.from_bytes(told[at : at + 8], "big") for at in (0, 8)]
    assert len(told) == 16
    assert sum(counts(tmp_path).values()) == 3 * sum(granted)
    assert 400 <= sum(granted) < 600  # no room left unused, and each saw what the other took
    assert os.listdir(tmp_path) == [the_file(tmp_path).name]


def test_a_program_that_ends_without_close_adds_its_bytes(tmp_path: Path) -> None:
    code = "from tba._transfer.daily_allowance import Allowance; taken = Allowance(100); taken.take(7)"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"XDG_STATE_HOME": str(tmp_path)})
    assert list(counts(tmp_path / "tba").values()) == [7]


def so_far(directory: Path) -> int:
    """All that is counted; 0 while somebody is writing, or before there is a table."""
    try:
        return sum(counts(directory).values())
    except sqlite3.OperationalError:
        return 0


def test_a_killed_process_leaves_a_file_that_reads(tmp_path: Path) -> None:
    total = 0
    children, results = takers(tmp_path, 1 << 60, 1 << 40)
    for child in children:
        while not the_file(tmp_path).exists() or so_far(tmp_path) <= total:
            assert os.waitpid(child, os.WNOHANG) == (0, 0)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        total = sum(counts(tmp_path).values())
        assert total % 3 == 0
    os.close(results)
    taken = allowance(tmp_path, 1 << 60)
    assert taken.take(1)  # the lock died with its holder
    taken.close()
    assert sum(counts(tmp_path).values()) == total + 1


def test_a_forked_child_counts_for_itself(tmp_path: Path) -> None:
    taken = allowance(tmp_path, 100)
    assert taken.take(40)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of any fork beside threads
        child = os.fork()
    if child == 0:
        ok = False
        try:
            ok = taken.take(7)
            taken.close()
        finally:
            os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert counts(tmp_path) == {"2026-03-29": 7}
    taken.close()
    assert counts(tmp_path) == {"2026-03-29": 47}  # the 40 once


# -- against a model -------------------------------------------------------------------------------------------------

operations = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(0, 1), st.integers(0, 60)),
        st.tuples(st.just("wait"), st.just(0), st.sampled_from([1, 3, 5, 3600, DAY_S])),
        st.tuples(st.just("set clock"), st.just(0), st.integers(-2 * DAY_S, 2 * DAY_S)),
        st.tuples(st.just("reopen"), st.integers(0, 1), st.just(0)),
    ),
    max_size=40,
)


@settings(derandomize=True, deadline=None, max_examples=examples(60))
@given(operations)
def test_two_users_of_one_file_against_a_model(steps: list[tuple[str, int, int]]) -> None:
    limit = 100
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings(), clock_in_force() as clock:
        warnings.simplefilter("ignore", OffloadWarning)
        directory = Path(name)
        both = [allowance(directory, limit) for _ in range(2)]
        total = Counter[str]()
        since_open = [Counter[str](), Counter[str]()]
        for what, who, amount in steps:
            day = datetime.datetime.fromtimestamp(clock.wall_s, datetime.UTC).date().isoformat()
            if what == "take":
                if both[who].take(amount):
                    total[day] += amount
                    since_open[who][day] += amount
                    assert since_open[who][day] <= limit
                else:
                    assert total[day] + amount > limit  # never declined while there was room
            elif what == "wait":
                clock.wait(amount)
            elif what == "set clock":
                clock.wall_s += amount
            else:
                both[who].close()
                both[who] = allowance(directory, limit)
                since_open[who].clear()
        for taken in both:
            taken.close()
        recorded = counts(directory) if the_file(directory).exists() else {}
        assert Counter(recorded) == total
