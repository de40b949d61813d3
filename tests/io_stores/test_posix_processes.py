"""PosixStore among processes that share a path, end or are killed in mid-transfer, and on devices that hang."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from io_backends import PosixStore, StoreStalled
from io_backends._file.rate import RateLimit
from support.stores import WAIT_S, Held, buffer_of, is_open, pattern_at, read_back, write

_PROCESS = """
import sys, threading
import numpy as np
sys.path.insert(0, {tests!r})
from io_backends import PosixStore
from support.stores import buffer_of, pattern_at, read_back, write
store = PosixStore({directory!r}, checksum=True)
"""


def run_python(code: str, directory: Path) -> subprocess.Popen[str]:
    head = _PROCESS.format(tests=str(Path(__file__).parents[1]), directory=str(directory))
    return subprocess.Popen(
        [sys.executable, "-c", head + code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_two_processes_on_one_path_do_not_see_each_other(scratch: Path) -> None:
    code = """
seed = {seed}
for turn in range(40):
    arrays = [pattern_at(64, 100_000 + turn, seed + turn + k) for k in range(4)]
    tickets = [store.write(buffer_of(array)) for array in arrays]
    for ticket, array in zip(tickets, arrays):
        assert ticket.wait(60)
        assert np.array_equal(read_back(store, ticket), array)
        store.discard(ticket)
store.close()
print("good")
"""
    processes = [run_python(code.format(seed=1000 * number), scratch) for number in range(2)]
    assert [process.communicate(timeout=WAIT_S)[0] for process in processes] == ["good\n"] * 2
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize(
    "ending",
    [
        "",  # the interpreter ends with writes and reads queued
        "sys.exit(0)",
        "store.abandon()",
        "store.close()",
        "import atexit; atexit.register(store.close)",
        "del store, tickets, reads",
        "import os; os._exit(0)",
    ],
)
def test_an_interpreter_that_ends_with_transfers_in_flight_does_not_hang(scratch: Path, ending: str) -> None:
    code = f"""
big = pattern_at(0, 30 << 20)
first = write(store, big)
tickets = [store.write(buffer_of(big)) for _ in range(6)]
reads = [store.read(first.location, buffer_of(pattern_at(0, 30 << 20, 1), padded=True)) for _ in range(2)]
print("in flight", flush=True)
{ending}
"""
    process = run_python(code, scratch)
    output, _ = process.communicate(timeout=WAIT_S)
    assert (output, process.returncode) == ("in flight\n", 0)
    assert list(scratch.iterdir()) == []


def test_a_killed_process_leaves_nothing(scratch: Path) -> None:
    process = run_python(
        """
big = pattern_at(0, 30 << 20)
tickets = [store.write(buffer_of(big)) for _ in range(6)]
print("in flight", flush=True)
import time; time.sleep(60)
""",
        scratch,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "in flight\n"
    process.kill()
    process.communicate(timeout=WAIT_S)
    assert list(scratch.iterdir()) == []
    write_again = PosixStore(scratch)
    write(write_again, pattern_at(0, 10))
    write_again.close()


# -- a device that hangs -------------------------------------------------------------------------------------------


def test_close_gives_up_on_a_hung_device_whose_file_closes_when_it_ends(scratch: Path) -> None:
    held = Held()
    store = PosixStore(scratch, threads=2, timeout_s=0.2, syscalls=held.syscalls)
    running = store.write(buffer_of(pattern_at(0, 50_000)))
    held.await_begun()
    fd = store.open().fd
    with pytest.raises(StoreStalled, match=r"no byte of the store has moved for [\d.]+ s .* 50000 bytes"):
        running.wait()
    store.close()  # returns
    assert is_open(fd)
    assert not running.done()
    held.release.set()
    assert running.wait(WAIT_S)
    for slot in store._workers._slots:
        assert slot.thread is not None
        slot.thread.join(WAIT_S)
    assert not is_open(fd)


def test_a_slow_link_has_not_stalled(scratch: Path) -> None:
    """Each piece moves within the timeout, all of them together take twice as long."""
    store = PosixStore(scratch, timeout_s=1.0, write_rate_bytes_per_s=25_000)
    array = pattern_at(0, 50_000)
    ticket = store.write(buffer_of(array))
    assert ticket.wait()
    assert np.array_equal(read_back(store, ticket), array)
    store.close()


@pytest.mark.parametrize("limited", ["write", "read"])
def test_writes_and_reads_are_limited_each_on_its_own(
    scratch: Path, limited: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    paced: list[int] = []
    monkeypatch.setattr(RateLimit, "pace", lambda self, nbytes: paced.append(nbytes))
    store = PosixStore(scratch, **{f"{limited}_rate_bytes_per_s": 1e9})  # type: ignore[arg-type]
    array = pattern_at(0, 50_000)
    ticket = write(store, array)
    written = sum(paced)
    assert np.array_equal(read_back(store, ticket), array)
    assert (written, sum(paced) - written) == (
        (ticket.moved_bytes, 0) if limited == "write" else (0, ticket.moved_bytes)
    )
    store.close()
