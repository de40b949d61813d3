"""Workers: named threads that run a store's tickets, reads before writes.

Guarantees:

1. `submit` and `stop` never block, so finalizers may call them: they append to deques and put a token into a
   `SimpleQueue`, whose `put` is reentrant. Once the threads run, they take no lock of ours.
2. A ticket that fails leaves its worker alive (`Ticket.run`). An exception in the loop itself breaks the store: the
   tickets of that worker and in the queues fail with StoreBroken, as does every later `submit`.
3. Between jobs a worker holds no reference to the last one, so memory is freed as soon as a transfer ends.
4. `held()` waits for running tickets and holds new ones; used around `fork` (`_workers.fork`).
5. If all workers are busy, the next one at the queue takes several writes at once if its store can move them together
   (`batch_writer`). If another is idle or about to look, each gets its own.
6. Waiters learn when nothing moves any more (`check`), even if a thread hangs in the system.

Where threads meet:

- Every ticket has a token, put after it. A worker takes at least one ticket per token, if there is one, so no ticket
  stays in a queue without a worker to come. Tickets taken together leave tokens that wake a worker for nothing.
- `submit` and the last worker's end. The submitter (1) sees the pool open, (2) appends its ticket, (3) checks whether a
  worker runs. The last worker (a) counts itself out, (b) fails what is queued. With (2) before (b) the worker fails the
  ticket. With (b) before (2), (a) was before (3), so the submitter sees that none runs and fails it itself.
- `stop` and the first `submit`. `_begin` starts the threads and opens the pool under a lock. `stop` takes no lock, as a
  finalizer of the thread that holds it may call it. So it may see no thread or some of them, and put its tokens before
  the others exist. `_begin` finally checks whether the pool was stopped, and puts those tokens again.
- `stop` and a running ticket. The ticket completes; only tickets taken afterwards fail with StoreClosed.
- Two workers at the queue. `_taking` is held while one looks at the first ticket and takes it.

Threads are daemons: an interpreter that exits with I/O in flight does not wait for it, as scratch data is worthless
then.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from typing import Protocol

from .._errors import StoreBroken, StoreClosed, StoreError, StoreStalled
from .._ticket import Ticket, let_go
from .fork import ForkAware

_PERIOD_S = 0.25  # how often a waiter checks for progress: rarely enough to cost nothing
_number = itertools.count()


class MovesBatches(Protocol):
    """What moves several of a store's writes at once."""

    def takes(self, tickets: Sequence[Ticket], another: Ticket) -> bool:
        """Whether `another` may go with these tickets, of which there may be none."""

    def write(self, tickets: Sequence[Ticket]) -> None:
        """Move them, and set each one's location and bytes. If it raises, nothing has changed."""


class _Slot:
    """One thread and its work.

    Attributes:
        busy: held during a job, and while the worker looks for one.
        in_hand: its tickets; several if it runs them together.
        cpu_s: CPU time of the thread when its last ticket had run: what it takes between two is the next one's.
    """

    __slots__ = ("busy", "cpu_s", "in_hand", "thread")

    def __init__(self) -> None:
        self.busy = threading.Lock()
        self.cpu_s = 0.0
        self.in_hand: list[Ticket] = []
        self.thread: threading.Thread | None = None


class Workers(ForkAware):
    """`count` threads, started with the first ticket.

    `on_stopped` runs on the last thread to end, or in `stop` if there is none; a `stop` concurrent with the very first
    `submit` may run it twice. `on_forked` runs in a forked child, where the threads do not exist.

    Attributes:
        timeout_s: a wait fails if no byte has moved for this long; None for never.
        moved_s: when bytes last moved (`time.perf_counter()`); the store updates it.
        batch_writer: moves several writes at once; a store sets it before its first ticket.
    """

    def __init__(
        self,
        count: int,
        name: str,
        on_stopped: Callable[[], None],
        *,
        on_forked: Callable[[], None] = lambda: None,
        timeout_s: float | None = 60.0,
    ) -> None:
        if count < 1:
            raise ValueError(f"a store needs at least one worker, got {count}")
        if timeout_s is not None and not timeout_s > 0:
            raise ValueError(f"a timeout must be positive, or None for never; got {timeout_s} seconds")
        self.timeout_s = timeout_s
        self.moved_s = 0.0
        self.batch_writer: MovesBatches | None = None
        self._name = f"{name}-{next(_number)}"
        self._reads: deque[Ticket] = deque()
        self._writes: deque[Ticket] = deque()
        self._tokens: SimpleQueue[bool] = SimpleQueue()  # one True per ticket; False ends a worker
        self._taking = threading.Lock()
        self._slots = [_Slot() for _ in range(count)]
        self._lock = threading.Lock()  # for starting and ending threads
        self._on_stopped = on_stopped
        self._on_forked = on_forked
        self._open = False  # threads exist and take tickets
        self._stopping = self._forked = self._frozen = False
        self._running = 0
        self._cause: BaseException | None = None  # of a loop's unexpected end
        self.heed_forks()

    # -- for stores ----------------------------------------------------------------------------------------------

    def submit(self, ticket: Ticket, *, urgent: bool) -> Ticket:
        """Queue a ticket; returns it. Raises StoreClosed after `stop`, StoreBroken after a worker's loop has failed."""
        if not self._open:
            self._begin()
        ticket.watch = self
        (self._reads if urgent else self._writes).append(ticket)
        self._tokens.put(True)
        if self._stopping and not self._running:
            self._fail_queued()
        return ticket

    def refuse(self) -> None:
        """Raise StoreClosed after `stop`, StoreBroken after a worker's loop has failed."""
        if self._cause is not None:
            raise StoreBroken(f"a worker of the store died: {self._cause!r}; make a new one") from self._cause
        if self._stopping:
            raise StoreClosed("the store is closed; make a new one")

    @property
    def ended(self) -> bool:
        return self._stopping and not self._running

    def stop(self) -> None:
        """Ask the threads to end after their running tickets; queued ones fail with StoreClosed. Idempotent."""
        if self._stopping:
            return
        self._stopping = True
        self._open = False
        if not any(slot.thread for slot in self._slots):
            self._on_stopped()
        self._end_threads()

    def join(self) -> None:
        """Wait until the threads have ended, unless nothing moves any more. Skips the calling thread."""
        if self._frozen:
            return
        begun_s = time.perf_counter()
        with self._lock:
            pass  # all threads that are being started exist after this
        for slot in self._slots:
            thread = slot.thread
            while thread is not None and thread is not threading.current_thread() and thread.is_alive():
                thread.join(self.period_s)
                if self.stalled_s(begun_s):
                    break

    @contextmanager
    def held(self) -> Iterator[None]:
        """No ticket runs inside, except one that has stalled."""
        begun_s = time.perf_counter()
        with ExitStack() as stack:
            for slot in self._slots:
                while not slot.busy.acquire(timeout=self.period_s):
                    if self.stalled_s(begun_s):
                        break
                else:
                    stack.callback(slot.busy.release)
            yield

    def forget(self) -> None:
        """In a forked child: the threads do not exist here; accept nothing more."""
        self._open, self._stopping, self._forked = False, True, True
        self._lock = threading.Lock()  # another thread may have held it
        self._slots = []
        self._running = 0
        self._on_forked()

    def freeze(self, deadline_s: float) -> None:
        """At the interpreter's exit: begin no ticket; running ones may end until then."""
        self._open, self._stopping, self._frozen = False, True, True
        for slot in self._slots:
            slot.busy.acquire(timeout=max(0.0, deadline_s - time.monotonic()))  # never released

    # -- for waiters (`Watch`) -----------------------------------------------------------------------------------------

    @property
    def period_s(self) -> float:
        return _PERIOD_S if self.timeout_s is None else min(_PERIOD_S, self.timeout_s / 4)

    def check(self, ticket: Ticket, since_s: float) -> None:
        if self._forked:
            raise StoreClosed("a transfer of the parent process cannot be waited for in a forked child")
        if self._frozen and not ticket.done():
            raise StoreClosed("the interpreter is exiting: nothing is transferred any more")
        if self._cause is not None and self.ended and not ticket.done():
            raise self._ending()
        stalled_s = self.stalled_s(since_s)
        if stalled_s and not ticket.done():
            raise StoreStalled(
                f"no byte of the store has moved for {stalled_s:.3g} s while a transfer of {ticket.nbytes} bytes was "
                "waited for: the device hangs, or is slower than the store's timeout_s allows"
            )

    def stalled_s(self, since_s: float) -> float:
        """How long nothing has moved since `since_s`; 0 if that is within the timeout."""
        still_s = time.perf_counter() - max(since_s, self.moved_s)
        return still_s if self.timeout_s is not None and still_s > self.timeout_s else 0.0

    # -- threads -------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        with self._lock:
            if not self._stopping and not self._open:
                self._start()
                self._open = True
                if self._stopping:
                    self._open = False
                    self._end_threads()
                    return
        self.refuse()

    def _start(self) -> None:
        """Start the threads, or as many as the process may have. Raises RuntimeError if that is none."""
        for number, slot in enumerate(self._slots):
            name = f"{self._name}-{number}"
            slot.thread = threading.Thread(target=self._loop, args=(slot,), name=name, daemon=True)
            self._running += 1  # before it may end
            try:
                slot.thread.start()
            except RuntimeError:  # "can't start new thread"
                slot.thread = None
                self._running -= 1
                if not self._running:
                    raise
                return

    def _end_threads(self) -> None:
        for _ in self._slots:
            self._tokens.put(False)

    def _loop(self, slot: _Slot) -> None:
        slot.cpu_s = time.thread_time()
        try:
            while self._tokens.get():
                with slot.busy:
                    self._run_next(slot)
                    slot.in_hand.clear()
        except BaseException as error:
            let_go(error)
            self._break(slot, error)
        with self._lock:
            self._running -= 1
            last = self._running == 0
        if last:
            self._fail_queued()
            self._on_stopped()

    def _run_next(self, slot: _Slot) -> None:
        # A separate function, so that an idle worker's locals keep nothing alive.
        if self._frozen:
            return
        self._take(slot, (self._reads, self._writes))
        started = [ticket for ticket in slot.in_hand if ticket.start()]
        if self._stopping:
            for ticket in started:
                ticket.abort(self._ending())
        elif len(started) < 2 or not self._write_together(slot, started):
            for ticket in started:
                while len(started) > 1 and (read := self._take(slot, (self._reads,))) is not None:
                    if read.start():  # reads go first here too
                        self._run(slot, read)
                self._run(slot, ticket)

    def _run(self, slot: _Slot, ticket: Ticket) -> None:
        ticket.run(time.perf_counter, slot.cpu_s)
        slot.cpu_s += ticket.cpu_s
        self.moved_s = ticket.ended_s

    def _take(self, slot: _Slot, queues: Sequence[deque[Ticket]]) -> Ticket | None:
        """Take the next ticket. It is in hand before it leaves the queue, so it is always in one of the two."""
        with self._taking:
            queue = next(filter(None, queues), None)
            if queue is None:
                return None
            tickets, batch_writer = slot.in_hand, self.batch_writer
            tickets.append(queue[0])
            queue.popleft()
            if batch_writer is None or queue is self._reads or not all(other.in_hand for other in self._slots):
                return tickets[-1]
            while queue and batch_writer.takes((), tickets[0]) and batch_writer.takes(tickets, queue[0]):
                tickets.append(queue[0])
                queue.popleft()
            return tickets[-1]

    def _write_together(self, slot: _Slot, tickets: list[Ticket]) -> bool:
        assert self.batch_writer is not None
        started_s = time.perf_counter()
        try:
            self.batch_writer.write(tickets)
        except BaseException:  # even SystemExit, as in `Ticket.run`; each ticket is then tried alone
            return False
        self.moved_s = ended_s = time.perf_counter()
        ended_cpu_s = time.thread_time()
        cpu_s, slot.cpu_s = (ended_cpu_s - slot.cpu_s) / len(tickets), ended_cpu_s
        for ticket in tickets:
            ticket.started_s, ticket.ended_s = started_s, ended_s
            ticket.cpu_s = cpu_s
            ticket.finish()
        return True

    def _break(self, slot: _Slot, cause: BaseException) -> None:
        """A loop has failed: take nothing more, end the other threads, fail what this one had."""
        self._cause = cause
        self._open, self._stopping = False, True
        self._end_threads()
        for ticket in slot.in_hand:
            ticket.abort(self._ending(f"the worker that had the transfer of {ticket.nbytes} bytes died"))
        slot.in_hand.clear()

    def _fail_queued(self) -> None:
        """Fail the queued tickets once no worker is left to take them."""
        for queue in () if self._frozen else (self._reads, self._writes):
            while queue:
                try:
                    queue.popleft().abort(self._ending())
                except IndexError:  # a submitter and the last worker both do this
                    break

    def _ending(self, what: str = "a worker of the store died before this transfer ended") -> StoreError:
        if self._cause is None:
            return StoreClosed("the store was closed before this transfer started")
        error = StoreBroken(f"{what}: {self._cause!r}")
        error.__cause__ = self._cause
        return error
