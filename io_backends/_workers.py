"""Workers: a few named threads that run tickets, reads ahead of writes.

Guarantees:

1. `submit` and `stop` never block and may be called from a finaliser: they only append to deques and put a token
   into a `SimpleQueue`, whose `put` is reentrant.
2. A ticket that fails leaves its worker alive.
3. Between jobs a worker holds no reference to the last one, so memory goes the moment a transfer ends.
4. `held()` waits for running tickets and holds new ones; used around `fork`, because a fork with direct I/O in
   flight on private memory may tear pages (open(2), O_DIRECT, NOTES).

Threads are daemons: an interpreter that exits with I/O in flight does not wait for it; scratch data is worthless then.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from queue import SimpleQueue

from ._errors import StoreClosed
from ._store import Ticket

_number = itertools.count()


class Workers:
    """`count` threads, started with the first ticket.

    `on_stopped` runs on the last thread to end, or in `stop` where there is none; a `stop` beside the very first
    `submit` may run it both times.
    """

    def __init__(self, count: int, name: str, on_stopped: Callable[[], None]) -> None:
        if count < 1:
            raise ValueError(f"a store needs at least one worker, got {count}")
        self._name = f"{name}-{next(_number)}"
        self._reads: deque[Ticket] = deque()
        self._writes: deque[Ticket] = deque()
        self._tokens: SimpleQueue[bool] = SimpleQueue()  # one True per ticket; False ends a worker
        self._busy = [threading.Lock() for _ in range(count)]
        self._threads: list[threading.Thread] = []
        self._start_lock = threading.Lock()
        self._on_stopped = on_stopped
        self._stopping = False
        self._running = 0

    def submit(self, ticket: Ticket, *, urgent: bool) -> None:
        """Queue a ticket. Raises StoreClosed after `stop`."""
        if self._stopping:
            raise StoreClosed("the store is closed; make a new one")
        if not self._threads:
            self._start()
        (self._reads if urgent else self._writes).append(ticket)
        self._tokens.put(True)
        if self._stopping and not self._running:  # stopped between the check and here: nobody is left to take it
            self._fail_queued()

    def stop(self) -> None:
        """Ask the threads to end once their running tickets have; queued ones fail with StoreClosed. Idempotent."""
        if self._stopping:
            return
        self._stopping = True
        if not self._threads:
            self._on_stopped()
        for _ in self._threads:
            self._tokens.put(False)

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the threads have ended (not from one of them)."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout_s)

    @contextmanager
    def held(self) -> Iterator[None]:
        """No ticket runs inside."""
        with ExitStack() as stack:
            for lock in self._busy:
                stack.enter_context(lock)
            yield

    def forget(self) -> None:
        """In a forked child: the threads do not exist here; take nothing more."""
        self._stopping = True
        self._threads = []
        self._running = 0

    def _start(self) -> None:
        with self._start_lock:
            if self._threads or self._stopping:
                return
            threads = [
                threading.Thread(target=self._loop, args=(busy,), name=f"{self._name}-{index}", daemon=True)
                for index, busy in enumerate(self._busy)
            ]
            self._running = len(threads)
            for thread in threads:
                thread.start()
            self._threads = threads
            if self._stopping:  # meanwhile, by somebody who saw no thread to end
                for _ in threads:
                    self._tokens.put(False)

    def _loop(self, busy: threading.Lock) -> None:
        while self._tokens.get():
            with busy:
                self._run_next()
        with self._start_lock:
            self._running -= 1
            last = self._running == 0
        if last:
            self._fail_queued()
            self._on_stopped()

    def _run_next(self) -> None:
        # A function of its own: its locals end with it, so an idle worker keeps nothing alive.
        try:
            ticket = self._reads.popleft()
        except IndexError:
            ticket = self._writes.popleft()  # one token per ticket: never empty for a worker
        if not ticket.start():
            return
        if self._stopping:
            ticket.error = StoreClosed("the store was closed before this transfer started")
            ticket.finish()
        else:
            ticket.run(time.perf_counter)

    def _fail_queued(self) -> None:
        with suppress(IndexError):  # none left: a late `submit` and the last worker may both be at it
            while True:
                self._run_next()
