"""Arms of the io benchmark: ways to move the buffers of a rig to the disk and back.

`write`, `read` and `both` are timed; they return when the last transfer has ended. `both` returns the bytes per second
while reads and writes were both in flight. A `write` or `warm_read` precedes them: after a pause, the disk and sleeping
threads need some time to be fast again. After `warm_read`, `found` is everything that was read.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from io_backends import Buffer, Location, Store, Ticket

from .memory import Memory, Words

_TIMEOUT_S = 120.0


class Rig(NamedTuple):
    """The buffers: `sources` to write from, `targets` to read all of them into, and `few` for timed reads.

    Each of fio's jobs has one buffer, which stays in the processor's caches; that alone makes reads of 4 MiB a tenth
    faster than reads into 512 MiB. So timed reads use only as many buffers as there are transfers in flight, and reuse
    each when its transfer has ended.
    """

    sources: Memory
    targets: Memory
    few: Memory


class StoreArm:
    """A `Store` with `threads` workers in total, used as the engine uses it: one thread submits, the workers transfer.

    Attributes:
        submit_cpu_s, submit_wall_s: the submitting thread's time per transfer, in the last `write` or `read`.
    """

    def __init__(self, store: Store, threads: int, rig: Rig) -> None:
        self._store, self._threads, self._rig = store, threads, rig
        self._written: list[Ticket] = []
        self.submit_cpu_s = self.submit_wall_s = 0.0

    @property
    def found(self) -> Sequence[Words]:
        return self._rig.targets.words

    def warm_read(self) -> None:
        self._submit(self._reads(self._rig.targets.buffers))

    def write(self) -> None:
        self._discard(self._written)
        self._written = self._submit([partial(self._store.write, buffer) for buffer in self._rig.sources.buffers])

    def read(self) -> None:
        flow = self._flow_of_reads(self._threads)
        flow.begin()
        flow.wait()

    def both(self) -> float:
        """Read what was written last, and write it again elsewhere, half of the workers for each.

        In one queue, all reads would precede the writes, so each direction has its own depth. Twice as many writes are
        in flight, as in training, which keeps all paths of a striped store busy.
        """
        share, before = max(1, self._threads // 2), self._written
        reads = self._flow_of_reads(share)
        writes = _Flow([partial(self._store.write, buffer) for buffer in self._rig.sources.buffers], 2 * share)
        begun_s = time.perf_counter()
        reads.begin()
        writes.begin()
        flows = [[(t.started_s, t.ended_s, t.nbytes) for t in flow.wait()] for flow in (reads, writes)]
        self._written = writes.tickets
        self._discard(before)
        return together(begun_s, flows)

    def close(self) -> None:
        self._discard(self._written)
        self._store.close()

    def _flow_of_reads(self, at_once: int) -> _Flow:
        free = deque(self._rig.few.buffers[:at_once])

        def read(location: Location, on_done: Callable[[Ticket], object]) -> Ticket:
            buffer = free.popleft()

            def left(ticket: Ticket) -> None:
                free.append(buffer)
                on_done(ticket)

            return self._store.read(location, buffer, on_done=left)

        return _Flow([partial(read, ticket.location) for ticket in self._written], at_once)

    def _reads(self, buffers: Sequence[Buffer]) -> list[partial[Ticket]]:
        pairs = zip(self._written, buffers, strict=True)
        return [partial(self._store.read, ticket.location, buffer) for ticket, buffer in pairs]

    def _submit(self, jobs: Sequence[Callable[[], Ticket]]) -> list[Ticket]:
        begun_cpu_s, begun_s = time.thread_time(), time.perf_counter()
        tickets = [job() for job in jobs]
        ended_cpu_s, ended_s = time.thread_time(), time.perf_counter()
        self.submit_cpu_s = (ended_cpu_s - begun_cpu_s) / len(jobs)
        self.submit_wall_s = (ended_s - begun_s) / len(jobs)
        for ticket in reversed(tickets):  # the last first: this thread then wakes once, not once for each
            ticket.wait()
        return tickets

    def _discard(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            self._store.discard(ticket)


class _Flow:
    """Transfers of one kind, `depth` at a time: when one ends, its worker submits the next."""

    def __init__(self, jobs: Sequence[Callable[..., Ticket]], depth: int) -> None:
        self.tickets: list[Ticket] = []
        self._left, self._depth = iter(jobs), depth
        self._lock = threading.Lock()
        self._all_submitted = threading.Event()

    def begin(self) -> None:
        for _ in range(self._depth):
            self._next()

    def wait(self) -> list[Ticket]:
        """Wait for all transfers. Raises the first error."""
        if not self._all_submitted.wait(_TIMEOUT_S):
            raise TimeoutError(f"some transfers were not submitted within {_TIMEOUT_S:g} s")
        for ticket in self.tickets:
            ticket.wait()
        return self.tickets

    def _next(self, _: Ticket | None = None) -> None:
        with self._lock:
            job = next(self._left, None)
            if job is None:
                self._all_submitted.set()
            else:
                self.tickets.append(job(on_done=self._next))


def together(begun_s: float, flows: Sequence[Sequence[tuple[float, float, int]]]) -> float:
    """Bytes per second of all flows until the first of them ends; after that, the others have the disk to themselves.

    Args:
        begun_s: the beginning, by `time.perf_counter()`.
        flows: (start, end, bytes) of each transfer. One that is in flight at the end counts by its share of time.
    """
    until_s = min(max(end_s for _, end_s, _ in flow) for flow in flows)
    spans = [span for flow in flows for span in flow if span[0] < until_s]
    moved = sum(nbytes * min(1.0, (until_s - start_s) / (end_s - start_s)) for start_s, end_s, nbytes in spans)
    return moved / (until_s - begun_s)
