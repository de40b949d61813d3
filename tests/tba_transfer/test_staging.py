"""Staging: bytes in flight stay below their cap, a landing ends a wait, and a slow disk is no stall."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from io_backends.testing import Fault, Operation
from support.engine import activation, engine, save
from support.stores import WAIT_S
from tba._transfer import staging as _staging
from tba._transfer.staging import Staging

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
    monkeypatch.setattr(_staging, "_PERIOD_S", math.inf)
    return scripted


def staging_of(condition: Any, timeout_s: float = TIMEOUT_S) -> Staging:
    return Staging(cast(threading.Condition, condition), timeout_s)


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


def test_a_wait_lands_for_itself_what_a_worker_could_not(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    """It found the lock taken, and goes on: whoever has the lock may be waiting for it."""
    monkeypatch.setattr(_staging, "_PERIOD_S", 4.0)
    ended = [False, False, False, True]  # the first look is ahead of the wait
    staging = Staging(
        cast(threading.Condition, scripted), TIMEOUT_S, lambda: staging.land(10) if ended.pop(0) else None
    )
    staging.depart(10)
    scripted.script = [(99.0, lambda: None)] * 3
    assert staging.wait_until_idle()
    assert scripted.waits == [4.0, 4.0, 2.0]  # together no longer than the timeout
    assert not ended


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


def test_a_worker_whose_write_has_ended_does_not_wait_for_who_waits_for_it(scratch: Path) -> None:
    """One thread has the lock and waits for a read (a comparison in pack does), another waits for room."""
    hold, go_on = threading.Event(), threading.Event()

    def plan(operation: Operation, _: int) -> Fault | None:
        return Fault(gate=go_on) if operation == "write" and hold.is_set() else None

    with engine(scratch, plan, threads=1, prefetch_bytes=0) as offload:
        mover = offload._saver.mover
        with offload:
            graphs = [save(activation(4096)[1])]
            offload.flush()
            (stored,) = (reference() for reference in offload._saver.read_ahead.records.values())
            hold.set()
            graphs.append(save(activation(4096)[1]))
        flushing = threading.Thread(target=offload.flush)
        flushing.start()
        deadline_s = time.monotonic() + WAIT_S
        while not mover.staging.waiters and time.monotonic() < deadline_s:
            time.sleep(0.001)
        assert stored is not None
        assert stored.write is not None
        assert mover.store is not None
        with mover.lock:
            go_on.set()
            _, buffer = mover.memory.of(stored.device).lease(stored.nbytes, stored.write.location.skew)
            assert mover.store.read(stored.write.location, buffer).wait(WAIT_S)
        flushing.join(WAIT_S)
        assert not flushing.is_alive()
        assert offload.stats().written_bytes >= 2 * 4096 * 4
        del graphs
