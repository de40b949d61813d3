"""PosixStore from the first transfer to close, abandon, and fork: nothing opened twice, nothing left open."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from io_backends import BufferPool, PosixStore, StoreBroken, StoreClosed, Syscalls, TicketState
from support.stores import WAIT_S, Held, buffer_of, empty_at, in_child, is_open, pattern_at, read_back, write

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def raises_closed(action: Callable[[], object]) -> bool:
    try:
        action()
    except StoreClosed:
        return True
    return False


class Descriptors:
    """Counts what is opened and closed."""

    def __init__(self) -> None:
        self.opened: list[int] = []
        self.closed: list[int] = []

    def open(self, path: str, flags: int, mode: int) -> int:
        fd = os.open(path, flags, mode)
        self.opened.append(fd)
        return fd

    def close(self, fd: int) -> None:
        os.close(fd)
        self.closed.append(fd)

    def syscalls(self) -> Syscalls:
        return Syscalls(open=self.open, close=self.close)


def test_no_file_and_no_thread_before_the_first_transfer(scratch: Path) -> None:
    descriptors, threads = Descriptors(), threading.active_count()
    store = PosixStore(scratch, syscalls=descriptors.syscalls())
    assert store.allocated_bytes() == store.used_bytes == 0
    assert descriptors.opened == []
    write(store, pattern_at(0, 10))
    assert threading.active_count() == threads + 2
    write(store, pattern_at(0, 10))
    assert len(descriptors.opened) == 1
    store.close()
    assert threading.active_count() == threads
    assert descriptors.closed == descriptors.opened


def test_abandoning_does_not_wait_and_the_last_worker_closes_the_file(scratch: Path) -> None:
    held = Held()
    store = held.store(scratch, threads=2)
    running = store.write(buffer_of(pattern_at(0, 3 * 4096)))
    held.await_begun()
    fd = store.open().fd
    store.abandon()  # returns, although the write is held back
    assert is_open(fd)
    with pytest.raises(StoreClosed):
        store.write(buffer_of(pattern_at(0, 5000)))
    held.release.set()
    assert running.wait(WAIT_S)
    store.close()
    assert not is_open(fd)


def test_a_store_that_is_closed_while_it_opens_leaves_no_descriptor(scratch: Path) -> None:
    descriptors = Descriptors()

    def open_and_close(path: str, flags: int, mode: int) -> int:
        store.close()
        return descriptors.open(path, flags, mode)

    store = PosixStore(scratch, syscalls=Syscalls(open=open_and_close, close=descriptors.close))
    with pytest.raises(StoreClosed, match=f"the store on '{scratch}' is closed; make a new one"):
        store.write(buffer_of(pattern_at(0, 10)))
    assert len(descriptors.opened) == 1
    assert descriptors.closed == descriptors.opened


def test_a_directory_that_is_not_there(scratch: Path) -> None:
    store = PosixStore(scratch / "nowhere")
    with pytest.raises(StoreBroken, match=f"cannot make a scratch file in '{scratch}/nowhere'") as caught:
        store.write(buffer_of(pattern_at(0, 10)))
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    (scratch / "nowhere").mkdir()
    write(store, pattern_at(0, 10))
    store.close()


# -- fork ----------------------------------------------------------------------------------------------------------


def test_a_forked_child_owns_nothing_and_the_parent_goes_on(scratch: Path) -> None:
    store = PosixStore(scratch)
    array = pattern_at(64, 50_000)
    ticket = write(store, array)
    fd = store.open().fd

    def child() -> str:
        found = [is_open(fd)]
        found.append(raises_closed(lambda: store.write(buffer_of(array))))
        found.append(raises_closed(lambda: store.read(ticket.location, buffer_of(empty_at(64, 50_000)))))
        found.append(raises_closed(store.open))
        store.discard(ticket)
        store.abandon()
        store.close()
        return f"{found} {store.allocated_bytes()}"

    assert in_child(child) == "[False, True, True, True] 0"
    assert np.array_equal(read_back(store, ticket), array)
    assert np.array_equal(read_back(store, write(store, array)), array)
    store.close()


def test_a_fork_while_another_thread_is_inside_the_store(scratch: Path) -> None:
    """The child has the lock, but not the thread that would release it."""
    store = PosixStore(scratch)
    array = pattern_at(64, 5000)
    ticket = write(store, array)

    def child() -> str:
        closed = raises_closed(lambda: store.write(buffer_of(array)))
        store.discard(ticket)
        return str(closed)

    with store._lock:  # for the child as good as another thread's
        assert in_child(child) == "True"
    store.close()


def test_forks_in_the_middle_of_many_transfers(scratch: Path) -> None:
    store = PosixStore(scratch)
    arrays = [pattern_at(64, 200_000, seed) for seed in range(30)]
    tickets = []
    for index, array in enumerate(arrays):
        tickets.append(store.write(buffer_of(array)))
        if index % 10 == 5:
            assert in_child(lambda: "ended") == "ended"
    for ticket, array in zip(tickets, arrays, strict=True):
        assert ticket.wait(WAIT_S)
        assert np.array_equal(read_back(store, ticket), array)
    pool = BufferPool(store.alignment)  # private memory, which a fork in mid-read may tear (open(2), O_DIRECT)
    reads = []
    for index, ticket in enumerate(tickets):
        view, buffer = pool.lease(ticket.nbytes, ticket.location.skew)
        reads.append((store.read(ticket.location, buffer), view))
        if index % 10 == 5:
            assert in_child(lambda: "ended") == "ended"
    for (read, view), array in zip(reads, arrays, strict=True):
        assert read.wait(WAIT_S)
        assert np.array_equal(np.frombuffer(view, np.uint8), array)
    store.close()


def test_a_child_may_have_a_store_of_its_own(scratch: Path) -> None:
    store = PosixStore(scratch)
    array = pattern_at(64, 50_000)
    write(store, array)

    def child() -> str:
        own = PosixStore(scratch)
        same = np.array_equal(read_back(own, write(own, array)), array)
        own.close()
        return str(same)

    assert in_child(child) == "True"
    store.close()


def test_a_fork_in_the_middle_of_a_held_write_waits_for_it(scratch: Path) -> None:
    held = Held()
    store = held.store(scratch, threads=2)
    array = pattern_at(64, 50_000)
    running = store.write(buffer_of(array))
    held.await_begun()
    queued = [store.write(buffer_of(array)) for _ in range(3)]
    states = [ticket.state for ticket in (running, *queued)]
    assert TicketState.RUNNING in states
    opener = threading.Timer(0.2, held.release.set)
    opener.start()

    def child() -> str:
        found = {ticket.state.name for ticket in (running, *queued)} - {"DONE", "QUEUED"}
        try:
            queued[-1].wait()
        except StoreClosed as error:
            return f"{found} {error}"
        return f"{found}"

    answer = in_child(child)
    assert answer in ("set()", "set() a transfer of the parent process cannot be waited for in a forked child")
    opener.join()
    for ticket in (running, *queued):
        assert ticket.wait(WAIT_S)
        assert np.array_equal(read_back(store, ticket), array)
    store.close()


def fork_from_threads(scratch: Path) -> None:
    """Fork from two threads while stores come and go, in a process that has loaded nothing else."""
    stores = [PosixStore(scratch) for _ in range(3)]
    array = pattern_at(64, 50_000)
    answers: list[str] = []

    def fork() -> None:
        for _ in range(5):
            answers.append(in_child(lambda: "ended"))

    forkers = [threading.Thread(target=fork) for _ in range(2)]
    for thread in forkers:
        thread.start()
    while any(thread.is_alive() for thread in forkers):
        tickets = [store.write(buffer_of(array)) for store in stores]
        fresh = PosixStore(scratch)
        tickets.append(fresh.write(buffer_of(array)))
        for ticket in tickets:
            assert ticket.wait(WAIT_S)
        fresh.close()
        for store, ticket in zip(stores, tickets, strict=False):
            store.discard(ticket)
    for thread in forkers:
        thread.join()
    assert answers == ["ended"] * 10
    for store in stores:
        store.close()


def test_two_threads_that_fork_at_once_and_stores_that_come_and_go(scratch: Path) -> None:
    """In a process of its own: a library that others have loaded may not survive a fork from a thread."""
    program = (
        "import pathlib, sys\n"
        "from io_stores.test_posix_life import fork_from_threads\n"
        "fork_from_threads(pathlib.Path(sys.argv[1]))"
    )
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(scratch)],
        cwd=tests,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)])},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("reused", [False, True])
def test_asking_for_blocks_while_the_last_worker_dies(
    reused: bool, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks has the file in hand when that worker closes it, and its number may be another file's at once."""
    (scratch / "other").write_bytes(bytes(1 << 20))
    store = PosixStore(scratch)
    write(store, pattern_at(0, 100_000))
    fd, fstat, others = store.open().fd, os.fstat, []
    assert store.allocated_bytes() >= 100_000

    def close_first(asked: int) -> os.stat_result:
        if asked == fd and not others:
            store._close_file()
            if reused:
                others.append(os.open(scratch / "other", os.O_RDONLY))
                assert others == [fd]
        return fstat(asked)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", close_first)
        assert store.allocated_bytes() == 0
        store.trim()
    assert store._file is None
    store.close()
    for other in others:
        os.close(other)
