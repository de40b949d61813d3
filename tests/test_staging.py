"""Staging: bytes in flight stay below their cap, a landing ends a wait, and a slow disk is no stall."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
from store_tools import WAIT_S

from tba import _staging
from tba._staging import Staging

TIMEOUT_S = 10.0


class Scripted:
    """Stands for the condition and the clock: each wait runs the next step of a script on this very thread.

    A step says how many seconds pass (more than the timeout asked for: that passes instead, and the wait gives up) and
    what happens then.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.script: list[tuple[float, Callable[[], None]]] = []
        self.waits: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def notify_all(self) -> None:
        """Nobody else waits."""

    def wait(self, timeout_s: float) -> bool:
        self.waits.append(timeout_s)
        after_s, happens = self.script.pop(0)
        if after_s > timeout_s:
            self.now_s += timeout_s
            return False
        self.now_s += after_s
        happens()
        return True


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    scripted = Scripted()
    monkeypatch.setattr(_staging, "time", scripted)
    return scripted


def staging_of(condition: Any, timeout_s: float = TIMEOUT_S) -> Staging:
    return Staging(cast(threading.Condition, condition), timeout_s)


def test_sums_and_peak(scripted: Scripted) -> None:
    staging = staging_of(scripted)
    for nbytes in (100, 50):
        staging.depart(nbytes)
    staging.land(100)
    staging.depart(20)
    assert (staging.bytes, staging.count, staging.peak_bytes) == (70, 2, 150)
    staging.land(50)
    staging.land(20)
    assert (staging.bytes, staging.count, staging.peak_bytes) == (0, 0, 150)


def test_no_wait_where_there_is_room(scripted: Scripted) -> None:
    staging = staging_of(scripted)
    assert staging.wait_until_idle()
    assert staging.wait_for_room(1000, cap_bytes=10)  # larger than the cap on its own, but alone
    staging.depart(60)
    assert staging.wait_for_room(40, cap_bytes=100)  # exactly full
    assert scripted.waits == []


def test_room_is_waited_for(scripted: Scripted) -> None:
    staging = staging_of(scripted)
    for nbytes in (60, 30, 10):
        staging.depart(nbytes)
    scripted.script = [
        (1.0, lambda: staging.land(10)),
        (1.0, lambda: staging.land(30)),
        (1.0, lambda: staging.land(60)),
    ]
    assert staging.wait_for_room(40, cap_bytes=100)
    assert (staging.bytes, len(scripted.waits)) == (60, 2)
    assert staging.wait_for_room(101, cap_bytes=100)
    assert (staging.count, len(scripted.waits)) == (0, 3)


def test_idle_is_waited_for(scripted: Scripted) -> None:
    staging = staging_of(scripted)
    for nbytes in (60, 0):  # transfers are counted, not their bytes
        staging.depart(nbytes)
    scripted.script = [(1.0, lambda: staging.land(60)), (1.0, lambda: staging.land(0))]
    assert staging.wait_until_idle()
    assert scripted.script == []


def test_nothing_landing_for_the_timeout_is_a_stall(scripted: Scripted) -> None:
    staging = staging_of(scripted)
    staging.depart(60)
    scripted.script = [(11.0, lambda: None)]
    assert not staging.wait_for_room(60, cap_bytes=100)
    scripted.script = [(11.0, lambda: None)]
    assert not staging.wait_until_idle()
    assert scripted.waits == [10.0, 10.0]
    assert staging.bytes == 60


def test_a_stall_is_waited_out_once_until_something_lands(scripted: Scripted) -> None:
    staging = staging_of(scripted)
    staging.depart(60)
    staging.depart(30)
    scripted.script = [(11.0, lambda: None)]
    assert not staging.wait_for_room(60, cap_bytes=100)
    assert not staging.wait_for_room(60, cap_bytes=100)
    assert staging.wait_for_room(10, cap_bytes=100)  # what has room needs no landing
    assert scripted.waits == [10.0]
    staging.land(30)
    scripted.script = [(1.0, lambda: staging.land(60))]
    assert staging.wait_for_room(60, cap_bytes=100)
    assert len(scripted.waits) == 2


def test_every_landing_begins_the_timeout_anew(scripted: Scripted) -> None:
    """A disk that moves is slow, not stalled, however long all of it takes."""
    staging = staging_of(scripted)
    for _ in range(5):
        staging.depart(10)
    scripted.script = [(9.0, lambda: staging.land(10)) for _ in range(5)]
    assert staging.wait_until_idle()
    assert scripted.now_s == 45.0
    assert scripted.waits == [10.0] * 5


def test_being_woken_for_nothing_does_not_begin_it_anew(scripted: Scripted) -> None:
    staging = staging_of(scripted)
    staging.depart(10)
    scripted.script = [(4.0, lambda: None), (4.0, lambda: None), (4.0, lambda: None)]
    assert not staging.wait_until_idle()
    assert scripted.waits == [10.0, 6.0, 2.0]


def test_a_landing_at_the_last_moment_counts(scripted: Scripted) -> None:
    """The wait times out, but by the time the lock is back a transfer has landed."""
    staging = staging_of(scripted)
    staging.depart(10)

    def wait(timeout_s: float) -> bool:
        staging.land(10)
        return False

    scripted.wait = wait  # type: ignore[method-assign]
    assert staging.wait_until_idle()


def test_waiting_releases_the_lock_and_a_landing_on_another_thread_ends_it() -> None:
    lock = threading.RLock()
    staging = staging_of(threading.Condition(lock), WAIT_S)
    staging.depart(60)

    def land() -> None:
        with lock:  # to be had only because the waiter lets go of it
            staging.land(60)

    thread = threading.Thread(target=land)
    with lock, lock:  # as the engine may hold it: more than once
        thread.start()
        assert staging.wait_for_room(60, cap_bytes=100)
        assert staging.count == 0
    thread.join()
