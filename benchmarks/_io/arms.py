"""Arms of the io benchmark: ways to bring the same buffers to the same disk and back.

An arm writes all buffers and returns when the last byte is where it belongs; reads what it wrote last; or does both at
once, reading what it wrote last while it writes the same buffers anew, to another place.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from io_backends import Store, Ticket

from .fio import Mode
from .memory import Memory

_TIMEOUT_S = 120.0


class Span(NamedTuple):
    """One transfer, by `time.perf_counter()`."""

    started_s: float
    ended_s: float
    nbytes: int


def together(begun_s: float, flows: Sequence[Sequence[Span]]) -> float:
    """Bytes per second of all flows from `begun_s` until the first of them ended: what is left of the others then has
    the disk for itself. Of a transfer under way at that moment, the share that its time has."""
    until_s = min(max(span.ended_s for span in flow) for flow in flows)
    spans = [span for flow in flows for span in flow if span.started_s < until_s]
    moved = sum(
        nbytes * min(1.0, (until_s - started_s) / (ended_s - started_s)) for started_s, ended_s, nbytes in spans
    )
    return moved / (until_s - begun_s)


class Arm(Protocol):
    """What is measured: `write`, `read` and, where it is among `modes`, `both`, which answers with the bytes per second
    while both were under way. The others run outside of the clock."""

    @property
    def modes(self) -> Sequence[Mode]: ...

    def load(self, sources: Memory) -> None: ...

    def unload(self, targets: Memory) -> None: ...

    def wipe(self) -> None: ...

    def write(self, sources: Memory) -> None: ...

    def read(self, targets: Memory) -> None: ...

    def both(self, sources: Memory, targets: Memory) -> float: ...

    def close(self) -> None: ...


class _InPlace:
    """For arms that keep no copy of the buffers."""

    modes: Sequence[Mode] = ("write", "read", "both")

    def load(self, sources: Memory) -> None:
        """Nothing to prepare."""

    def unload(self, targets: Memory) -> None:
        """It is there."""

    def wipe(self) -> None:
        """It keeps nothing."""


class StoreArm(_InPlace):
    """A `Store`, used as the engine does: one thread submits, the store's workers do the rest.

    Attributes:
        submit_cpu_s, submit_wall_s: of the last `write` or `read`, the submitting thread's time per transfer.
    """

    def __init__(self, store: Store, threads: int) -> None:
        self._store = store
        self._threads = threads
        self._written: list[Ticket] = []
        self.submit_cpu_s = self.submit_wall_s = 0.0

    def write(self, sources: Memory) -> None:
        self._discard(self._written)
        self._written = self._submit([partial(self._store.write, buffer) for buffer in sources.buffers])

    def read(self, targets: Memory) -> None:
        pairs = zip(self._written, targets.buffers, strict=True)
        self._submit([partial(self._store.read, ticket.location, buffer) for ticket, buffer in pairs])

    def both(self, sources: Memory, targets: Memory) -> float:
        """Half of the workers' number of reads under way, always: queued together, all would go ahead of the writes. Of
        those so many wait besides, as in training: the paths of a striped store then all have something to do."""
        store, written = self._store, self._written
        pairs = zip(written, targets.buffers, strict=True)
        reads = [partial(store.read, ticket.location, buffer) for ticket, buffer in pairs]
        share = max(1, self._threads // 2)
        flows = [_Flow(reads, share), _Flow([partial(store.write, buffer) for buffer in sources.buffers], 2 * share)]
        begun_s = time.perf_counter()
        for flow in flows:
            flow.begin()
        for flow in flows:
            flow.wait()
        self._discard(written)
        self._written = flows[1].tickets
        spans = [[Span(ticket.started_s, ticket.ended_s, ticket.nbytes) for ticket in flow.tickets] for flow in flows]
        return together(begun_s, spans)

    def close(self) -> None:
        self._discard(self._written)
        self._store.close()

    def _submit(self, jobs: Sequence[Callable[[], Ticket]]) -> list[Ticket]:
        begun_cpu_s, begun_s = time.thread_time(), time.perf_counter()
        tickets = [job() for job in jobs]
        ended_cpu_s, ended_s = time.thread_time(), time.perf_counter()
        self.submit_cpu_s = (ended_cpu_s - begun_cpu_s) / len(jobs)
        self.submit_wall_s = (ended_s - begun_s) / len(jobs)
        for ticket in reversed(tickets):  # the last first: like the other arms it is woken once, not for each
            _await(ticket)
        return tickets

    def _discard(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            self._store.discard(ticket)
        tickets.clear()


class _Flow:
    """Transfers of one kind, `depth` at a time: each that ends sends the next, on the worker that ended it."""

    def __init__(self, jobs: Sequence[Callable[..., Ticket]], depth: int) -> None:
        self.tickets: list[Ticket] = []
        self._depth = depth
        self._left = iter(jobs)
        self._unended = len(jobs)
        self._lock = threading.Lock()
        self._all_ended = threading.Event()

    def begin(self) -> None:
        for _ in range(self._depth):
            self._next()

    def wait(self) -> None:
        """Until all have ended. Raises the first error. Woken once, as whoever waits for the other arms is."""
        if not self._all_ended.wait(_TIMEOUT_S):
            raise TimeoutError(f"{self._unended} transfers have not ended within {_TIMEOUT_S:g} s")
        for ticket in self.tickets:
            _await(ticket)

    def _next(self, _: Ticket | None = None) -> None:
        with self._lock:
            job = next(self._left, None)
            if job is not None:
                self.tickets.append(job(on_done=self._on_done))

    def _on_done(self, ticket: Ticket) -> None:
        try:
            self._next()
        finally:
            with self._lock:
                self._unended -= 1
                if not self._unended:
                    self._all_ended.set()


class BareArm(_InPlace):
    """`os.pwrite` and `os.pread` with O_DIRECT on Python threads: what the system calls cost and nothing else."""

    def __init__(self, directory: Path, threads: int) -> None:
        path = directory / f"bare-{os.getpid()}.data"
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_DIRECT, 0o600)
        path.unlink()
        self._threads = threads
        self._half = 0  # of the file: `both` writes the one that is not read

    def write(self, sources: Memory) -> None:
        self._run([(os.pwrite, sources, self._half, self._threads)])

    def read(self, targets: Memory) -> None:
        self._run([(_pread, targets, self._half, self._threads)])

    def both(self, sources: Memory, targets: Memory) -> float:
        share = max(1, self._threads // 2)
        other = sources.nbytes if not self._half else 0
        begun_s = time.perf_counter()
        spans = self._run([(_pread, targets, self._half, share), (os.pwrite, sources, other, share)])
        self._half = other
        return together(begun_s, spans)

    def close(self) -> None:
        os.close(self._fd)

    def _run(self, works: Sequence[tuple[Callable[[int, memoryview, int], int], Memory, int, int]]) -> list[list[Span]]:
        failed: list[BaseException] = []

        def move(
            call: Callable[[int, memoryview, int], int], memory: Memory, start: int, jobs: list[int], spans: list[Span]
        ) -> None:
            try:
                while jobs:
                    index = jobs.pop()
                    view = memory.views[index]
                    started_s = time.perf_counter()
                    moved = call(self._fd, view, start + index * view.nbytes)
                    spans.append(Span(started_s, time.perf_counter(), moved))
                    if moved != view.nbytes:
                        raise OSError(f"{moved} of {view.nbytes} bytes moved")
            except IndexError:  # another thread took the last
                return
            except BaseException as error:
                failed.append(error)

        threads, seen = list[threading.Thread](), list[list[Span]]()
        for call, memory, start, count in works:
            jobs = list(reversed(range(len(memory.views))))
            seen.append([])
            arguments = (call, memory, start, jobs, seen[-1])
            threads += [threading.Thread(target=move, args=arguments) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]
        return seen


def _pread(fd: int, view: memoryview, offset: int) -> int:
    return os.preadv(fd, [view], offset)


def _await(ticket: Ticket) -> None:
    if not ticket.wait(_TIMEOUT_S):
        raise TimeoutError(f"a transfer of {ticket.nbytes} bytes did not end within {_TIMEOUT_S:g} s")
