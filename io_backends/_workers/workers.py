"""Workers: a few named threads that run a store's tickets, reads ahead of writes.

Guarantees:

1. `submit` and `stop` never block and may be called from a finaliser: they append to deques and put a token into a
   `SimpleQueue`, whose `put` is reentrant. No lock of ours is taken once the threads run.
2. A ticket that fails leaves its worker alive (`Ticket.run`). An exception in the loop itself breaks the store: the
   tickets in that worker's hands and in the queues fail with StoreBroken, and so does every later `submit`.
3. Between jobs a worker holds no reference to the last one, so memory goes the moment a transfer ends.
4. `held()` waits for running tickets and holds new ones; used around `fork` (`_workers.fork`).
5. Where all workers are busy, one that comes to the queue takes several writes at once, if its store can move them so
   (`batch_writer`). Where another is idle, or on its way to the queue, each gets its own.
6. Waiters learn when nothing moves any more (`check`), also where a thread hangs in the system and cannot tell.

Where threads meet:

- Every ticket has a token, put after it. A worker takes at least one ticket for each token it gets, if there is one,
  so no ticket is left in a queue without a worker to come. Tickets taken together leave tokens over; those wake a
  worker for nothing.
- `submit` against the last worker's end. The submitter (1) sees the pool open, (2) appends its ticket, (3) looks
  whether a worker runs. The last worker (a) counts itself out, (b) fails what is queued. With (2) before (b) the worker
  fails the ticket. With (b) before (2), (a) was before (3), so the submitter sees that none runs and fails it itself.
- `stop` against the first `submit`. `_begin` starts the threads and opens the pool under a lock; `stop` takes none, as
  a finaliser of the thread that holds it may call. It may thus see no thread, or some of them, and put its tokens
  before the others are there. `_begin` looks again, last, whether the pool has been stopped, and puts those tokens.
- `stop` against a running ticket. It ends; only tickets that a worker takes afterwards fail with StoreClosed.
- Two workers at the queue. `_taking` is held while one looks at what is first and takes it.

Threads are daemons: an interpreter that exits with I/O in flight does not wait for it; scratch data is worthless then.
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

# How often a waiter looks whether there is still something to wait for: rarely enough to cost nothing.
_PERIOD_S = 0.25

_number = itertools.count()


class MovesBatches(Protocol):
    """Seam of a store that moves several writes at once."""

    def takes(self, tickets: Sequence[Ticket], another: Ticket) -> bool:
        """Whether `another` goes with these, which may be none yet."""

    def write(self, tickets: Sequence[Ticket]) -> None:
        """Move them, and set each one's location and bytes. Raises where it cannot, and has changed nothing then."""


class _Slot:
    """One thread, and what it is at.

    Attributes:
        busy: held during a job, and while the worker looks for one.
        in_hand: its tickets, several where it runs them together.
    """

    __slots__ = ("busy", "in_hand", "thread")

    def __init__(self) -> None:
        self.busy = threading.Lock()
        self.in_hand: list[Ticket] = []
        self.thread: threading.Thread | None = None


class Workers(ForkAware):
    """`count` threads, started with the first ticket.

    `on_stopped` runs on the last thread to end, or in `stop` where there is none; a `stop` beside the very first
    `submit` may run it both times. `on_forked` runs in a forked child, where the threads do not exist.

    Attributes:
        timeout_s: a wait fails when no byte has moved for so long; None for never.
        moved_s: when bytes last moved, in `time.perf_counter()` seconds; the store keeps it up to date.
        batch_writer: moves several writes at once; set by a store that can, before its first ticket.
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
        self._open = False  # there are threads, and they take tickets
        self._stopping = self._forked = self._frozen = False
        self._running = 0
        self._cause: BaseException | None = None  # of a loop's unexpected end
        self.heed_forks()

    # -- for stores ----------------------------------------------------------------------------------------------

    def submit(self, ticket: Ticket, *, urgent: bool) -> Ticket:
        """Queue a ticket; returns it. Raises StoreClosed after `stop`, StoreBroken once a worker's loop has failed."""
        if not self._open:
            self._begin()
        ticket.watch = self
        (self._reads if urgent else self._writes).append(ticket)
        self._tokens.put(True)
        if self._stopping and not self._running:
            self._fail_queued()
        return ticket

    def refuse(self) -> None:
        """Raise StoreClosed after `stop`, StoreBroken once a worker's loop has failed."""
        if self._cause is not None:
            raise StoreBroken(f"a worker of the store died: {self._cause!r}; make a new one") from self._cause
        if self._stopping:
            raise StoreClosed("the store is closed; make a new one")

    @property
    def ended(self) -> bool:
        """Whether no thread runs, and none will."""
        return self._stopping and not self._running

    def stop(self) -> None:
        """Ask the threads to end once their running tickets have; queued ones fail with StoreClosed. Idempotent."""
        if self._stopping:
            return
        self._stopping = True
        self._open = False
        if not any(slot.thread for slot in self._slots):
            self._on_stopped()
        self._end_threads()

    def join(self) -> None:
        """Wait until the threads have ended (not from one of them), unless nothing moves any more."""
        if self._frozen:
            return
        begun_s = time.perf_counter()
        with self._lock:
            pass  # if some are being started, all have been now
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
        """In a forked child: the threads do not exist here; take nothing more."""
        self._open, self._stopping, self._forked = False, True, True
        self._lock = threading.Lock()  # another thread may have held it
        self._slots = []
        self._running = 0
        self._on_forked()

    def freeze(self, deadline_s: float) -> None:
        """At the interpreter's exit: no ticket is begun any more; running ones may end until then."""
        self._open, self._stopping, self._frozen = False, True, True
        for slot in self._slots:
            slot.busy.acquire(timeout=max(0.0, deadline_s - time.monotonic()))  # and never released

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
        """For how long nothing has moved, looking back no further than `since_s`; 0 if that is within the timeout."""
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
        """Start the threads, or as many as the process may have; raises RuntimeError if that is none."""
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
        # A function of its own: its locals end with it, so an idle worker keeps nothing alive.
        if self._frozen:
            return
        self._take(slot, (self._reads, self._writes))
        started = [ticket for ticket in slot.in_hand if ticket.start()]
        if self._stopping:
            for ticket in started:
                ticket.abort(self._ending())
        elif len(started) < 2 or not self._write_together(started):
            for ticket in started:
                while len(started) > 1 and (read := self._take(slot, (self._reads,))) is not None:
                    if read.start():  # reads go ahead here as well
                        self._run(read)
                self._run(ticket)

    def _run(self, ticket: Ticket) -> None:
        ticket.run(time.perf_counter)
        self.moved_s = ticket.ended_s

    def _take(self, slot: _Slot, queues: Sequence[deque[Ticket]]) -> Ticket | None:
        """Put what comes next into the worker's hands: before it leaves the queue, so that it is never in neither."""
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

    def _write_together(self, tickets: list[Ticket]) -> bool:
        assert self.batch_writer is not None
        started_s, begun_cpu_s = time.perf_counter(), time.thread_time()
        try:
            self.batch_writer.write(tickets)
        except BaseException:  # even SystemExit, as in `Ticket.run`: it comes again where it is one ticket's own
            return False
        self.moved_s = ended_s = time.perf_counter()
        cpu_s = (time.thread_time() - begun_cpu_s) / len(tickets)
        for ticket in tickets:
            ticket.started_s, ticket.ended_s = started_s, ended_s
            ticket.cpu_s = cpu_s
            ticket.finish()
        return True

    def _break(self, slot: _Slot, cause: BaseException) -> None:
        """A loop has failed: take nothing more, end the other threads, and fail what this one had."""
        self._cause = cause
        self._open, self._stopping = False, True
        self._end_threads()
        for ticket in slot.in_hand:
            ticket.abort(self._ending(f"the worker that had the transfer of {ticket.nbytes} bytes died"))
        slot.in_hand.clear()

    def _fail_queued(self) -> None:
        """Fail the queued tickets, once no worker is left to take them."""
        for queue in () if self._frozen else (self._reads, self._writes):
            while queue:
                try:
                    queue.popleft().abort(self._ending())
                except IndexError:  # a submitter and the last worker are both at it
                    break

    def _ending(self, what: str = "a worker of the store died before this transfer ended") -> StoreError:
        if self._cause is None:
            return StoreClosed("the store was closed before this transfer started")
        error = StoreBroken(f"{what}: {self._cause!r}")
        error.__cause__ = self._cause
        return error
