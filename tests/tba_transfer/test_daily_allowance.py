"""Daily allowance: what is counted and declined, for which day, and a file that cannot be kept."""

from __future__ import annotations

import errno
import itertools
import os
import sqlite3
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from support.daily_allowance import DAY_S, Clock, allowance, clock_in_force, counts, the_file
from tba import ClosedError, OffloadWarning
from tba._transfer import scratch_paths
from tba._transfer.daily_allowance import SYNC_S, Allowance, counts_file, projected_bytes_per_day


@pytest.fixture(autouse=True)
def clock() -> Iterator[Clock]:
    with clock_in_force() as clock:
        yield clock


def test_up_to_the_limit_and_no_further(tmp_path: Path) -> None:
    taken = allowance(tmp_path, 100)
    assert taken.take(60)
    assert taken.take(40)
    assert taken.written_today_bytes == 100
    assert taken.take(0)
    with pytest.warns(OffloadWarning, match=r"100 of the 100 bytes .* 2026-03-29 \(UTC\).*MAX_WRITE_BYTES_PER_DAY"):
        assert not taken.take(1)
    assert taken.written_today_bytes == 100  # what was declined is not counted
    taken.close()
    assert counts(tmp_path) == {"2026-03-29": 100}


def test_it_is_said_once_a_day(tmp_path: Path, clock: Clock) -> None:
    taken = allowance(tmp_path, 10)
    said = []
    for _ in range(3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert [taken.take(11) for _ in range(5)] == [False] * 5
        said.append([str(warning.message) for warning in caught])
        clock.wait(DAY_S)
    assert [len(texts) for texts in said] == [1, 1, 1]
    assert ["2026-03-29" in said[0][0], "2026-03-30" in said[1][0]] == [True, True]


def test_a_warning_turned_into_an_error_leaves_the_counts_right(tmp_path: Path) -> None:
    taken = allowance(tmp_path, 10)
    assert taken.take(6)
    with pytest.raises(OffloadWarning, match="6 of the 10 bytes"):
        taken.take(6)
    assert taken.take(4)
    assert taken.written_today_bytes == 10


def test_without_a_limit_nothing_is_counted_and_no_file_touched(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    taken = Allowance(None)
    assert all(taken.take(1 << 60) for _ in range(3))
    taken.give_back(5)
    clock.wait(DAY_S)
    assert taken.written_today_bytes == 0
    taken.close()
    assert os.listdir(tmp_path) == []


def test_the_file_is_in_the_users_state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    taken = Allowance(1000)
    assert not (tmp_path / "state").exists()  # making one costs nothing
    assert taken.take(7)
    taken.close()
    (day,) = counts(tmp_path / "state" / "tba").values()
    assert day == 7
    assert (tmp_path / "state" / "tba").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("environment", "home", "host", "file"),
    [
        ({"XDG_STATE_HOME": "/s"}, "/home/u", "node-7.example.org", "/s/tba/written-node-7_example_org.sqlite3"),
        ({}, "/home/u", "../x", "/home/u/.local/state/tba/written-___x.sqlite3"),
        ({"XDG_STATE_HOME": "relative"}, "/home/u", "", "/home/u/.local/state/tba/written-host.sqlite3"),
    ],
)
def test_where_counts_are_kept(environment: dict[str, str], home: str, host: str, file: str) -> None:
    assert counts_file(environment, home, host) == Path(file)


def test_the_file_is_looked_at_every_few_seconds_at_most(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = allowance(tmp_path, 1 << 40)
    looks = []
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **b: (looks.append(clock.monotonic_s), connect(*a, **b))[1])
    for _ in range(1000):
        taken.take(1)
        clock.wait(SYNC_S / 100)
    assert len(looks) == 10
    assert all(later - earlier >= SYNC_S for earlier, later in itertools.pairwise(looks))
    taken.close()
    assert counts(tmp_path) == {"2026-03-29": 1000}


@pytest.mark.parametrize("wall_s", [-1e12, 4e11], ids=["long ago", "far ahead"])
def test_a_clock_that_is_far_off_ends_no_training(wall_s: float, tmp_path: Path, clock: Clock) -> None:
    clock.wall_s = wall_s
    taken = allowance(tmp_path, 100)
    assert taken.take(60)
    taken.close()
    assert list(counts(tmp_path).values()) == [60]


def test_bytes_of_a_cancelled_write_come_back(tmp_path: Path, clock: Clock) -> None:
    taken = allowance(tmp_path, 100)
    assert taken.take(100)
    clock.wait(SYNC_S)
    assert taken.take(0)  # brings the 100 to the file
    assert counts(tmp_path) == {"2026-03-29": 100}
    taken.give_back(60)
    assert taken.written_today_bytes == 40
    assert taken.take(60)
    taken.give_back(60)
    taken.close()
    assert counts(tmp_path) == {"2026-03-29": 40}


def test_no_more_comes_back_than_was_taken_today(tmp_path: Path, clock: Clock) -> None:
    taken = allowance(tmp_path, 100)
    assert taken.take(100)
    clock.wait(DAY_S)
    assert taken.take(30)
    taken.give_back(100)
    assert taken.written_today_bytes == 0
    taken.close()
    assert counts(tmp_path) == {"2026-03-29": 100}


def test_what_a_day_would_take() -> None:
    assert projected_bytes_per_day(1000, 100) == 864_000
    assert projected_bytes_per_day(10, 0.0) == 864_000  # no division by nothing, and no wild guess


def test_after_close(tmp_path: Path) -> None:
    taken = allowance(tmp_path, 100)
    assert taken.take(5)
    taken.close()
    with pytest.raises(ClosedError, match="closed"):
        taken.take(1)
    assert taken.written_today_bytes == 5


# -- a file that cannot be kept -------------------------------------------------------------------------------------


def test_a_directory_that_cannot_be_made(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "state").write_text("a file where the directory should be")
    taken = allowance(tmp_path / "state", 100)
    with pytest.warns(OffloadWarning, match=r"the directory cannot be made \(.*\), so bytes .* in memory.*XDG_STATE"):
        assert taken.take(60)
    for _ in range(3):  # said once, tried again and again
        clock.wait(SYNC_S)
        assert taken.take(10)
    with pytest.warns(OffloadWarning, match="90 of the 100 bytes"):
        assert not taken.take(20)
    (tmp_path / "state").unlink()
    clock.wait(SYNC_S)
    assert taken.take(10)
    assert counts(tmp_path / "state") == {"2026-03-29": 90}
    taken.close()
    assert counts(tmp_path / "state") == {"2026-03-29": 100}


def test_a_file_that_is_no_database_is_left_alone_and_counting_goes_on_in_memory(tmp_path: Path) -> None:
    the_file(tmp_path).write_bytes(b"something else, and long enough not to pass for an empty database" * 20)
    taken = allowance(tmp_path, 100)
    with pytest.warns(OffloadWarning, match=r"sqlite3' does not work \(.*\), so bytes .* in memory.*remove it"):
        assert taken.take(60)
    with pytest.warns(OffloadWarning, match="60 of the 100"):
        assert not taken.take(60)
    assert the_file(tmp_path).read_bytes().startswith(b"something else")
    the_file(tmp_path).unlink()
    taken.close()
    assert counts(tmp_path) == {"2026-03-29": 60}


def test_a_file_lost_in_the_middle_gives_this_process_no_allowance_anew(tmp_path: Path, clock: Clock) -> None:
    taken = allowance(tmp_path, 100)
    assert taken.take(70)
    clock.wait(SYNC_S)
    assert taken.take(10)
    the_file(tmp_path).unlink()
    clock.wait(SYNC_S)
    with pytest.warns(OffloadWarning, match="80 of the 100"):
        assert not taken.take(30)


def test_one_that_stopped_in_the_middle_of_a_change_holds_nobody_up(tmp_path: Path, clock: Clock) -> None:
    allowance(tmp_path, 100).take(0)
    with closing(sqlite3.connect(the_file(tmp_path), isolation_level=None)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        taken = allowance(tmp_path, 100)
        assert taken.take(60)  # returns, though nothing is known of the file, and warns of nothing
        clock.wait(SYNC_S)
        assert taken.take(10)
    taken.close()
    assert counts(tmp_path) == {"2026-03-29": 70}


Patch = pytest.MonkeyPatch


def _read_only(state: Path, patch: Patch) -> None:
    def refuse(path: object, *arguments: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    patch.setattr(scratch_paths.os, "open", refuse)


def _without_a_home(state: Path, patch: Patch) -> None:
    patch.delenv("XDG_STATE_HOME", raising=False)
    patch.setattr(os.path, "expanduser", lambda path: path)  # what it does where the system knows no home


def _planted_link(state: Path, patch: Patch) -> None:
    state.mkdir(0o700)
    the_file(state).symlink_to(state.parent / "target")


def _directory_that_is_a_link(state: Path, patch: Patch) -> None:
    (state.parent / "target").mkdir()
    state.symlink_to(state.parent / "target")


def _of_another_user(state: Path, patch: Patch, first: int = 1) -> None:
    """The directory, or else the file in it."""
    allowance(state, 100).take(0)
    uids, mine = [0, 1][first:], os.getuid()
    patch.setattr(os, "getuid", lambda: mine + (uids.pop(0) if uids else 0))


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (_read_only, r"cannot be made \(Read-only file system\), so bytes .* in memory"),
        (_without_a_home, "no home directory is known.*set XDG_STATE_HOME"),
        (_planted_link, "sqlite3' is a symbolic link.*, so bytes written are counted in memory"),
        (_directory_that_is_a_link, "the directory is a symbolic link"),
        (_of_another_user, f"belongs to user {os.getuid()}, so"),
        (partial(_of_another_user, first=0), f"belongs to user {os.getuid()}, so"),
    ],
    ids=["read-only", "no home", "link", "directory is a link", "another's directory", "another's file"],
)
def test_where_no_file_can_be_kept_bytes_are_counted_in_memory(
    prepare: Callable[[Path, Patch], None], said: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    prepare(tmp_path / "state", monkeypatch)
    taken = Allowance(100) if prepare is _without_a_home else allowance(tmp_path / "state", 100)
    with pytest.warns(OffloadWarning, match=said):
        assert taken.take(60)
    taken.close()
    assert taken.written_today_bytes == 60
    target = tmp_path / "target"
    assert not target.exists() or list(target.iterdir()) == []  # no link was followed


# -- a place that others can write to -------------------------------------------------------------------------------


def test_nobody_else_can_read_or_write_what_is_kept(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        taken = allowance(tmp_path / "state", 100)
        assert taken.take(60)
        taken.close()
        with closing(sqlite3.connect(the_file(tmp_path / "state"), isolation_level=None)) as database:
            database.execute("BEGIN IMMEDIATE")
            database.execute("UPDATE written SET bytes = bytes + 1")
            seen = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "state").iterdir()}
    finally:
        os.umask(umask)
    assert {name.removeprefix(the_file(tmp_path).name): mode for name, mode in seen.items()} == {
        "": 0o600,
        "-journal": 0o600,
    }
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700


def test_what_others_could_read_is_made_private(tmp_path: Path) -> None:
    allowance(tmp_path, 100).take(0)
    tmp_path.chmod(0o777)
    the_file(tmp_path).chmod(0o666)
    allowance(tmp_path, 100).take(0)
    assert [path.stat().st_mode & 0o777 for path in (tmp_path, the_file(tmp_path))] == [0o700, 0o600]
