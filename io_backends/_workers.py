"""Workers: a few named threads that run tickets, reads ahead of writes.

Where all are busy, one that comes to the queue takes several writes at once, if its store can move them so.

Guarantees:

1. `submit` and `stop` never block and may be called from a finaliser: they only append to deques and put a token
   into a `SimpleQueue`, whose `put` is reentrant.
2. A ticket that fails leaves its worker alive. A worker that dies all the same (an exception in the loop itself) fails
   the ticket it had, and another thread takes its place; so no ticket waits for a thread that is not there.
3. Between jobs a worker holds no reference to the last one, so memory goes the moment a transfer ends.
4. `held()` waits for running tickets and holds new ones; used around `fork` (`_fork`).
5. A ticket depends on its own worker only.
6. Whoever waits learns when nothing moves any more (`check`), also where a thread hangs in the system and cannot tell.

Threads are daemons: an interpreter that exits with I/O in flight does not wait for it; scratch data is worthless then.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue

from . import _fork
from ._desk import Desk
from ._errors import StoreBroken, StoreClosed, StoreError, StoreStalled
from ._gather import Gatherer
from ._store import Ticket

# A pool whose threads keep dying has a reason that new ones will not cure.
MOST_DEATHS = 16
# How often a waiter looks whether there is still something to wait for: rarely enough to cost nothing.
_PERIOD_S = 0.25

_number = itertools.count()


class Workers:
    """`count` threads, started with the first ticket.

    `on_stopped` runs on the last thread to end, or in `stop` where there is none; a `stop` beside the very first
    `submit` may run it both times. `on_forked` runs in a forked child, where the threads do not exist.

    Attributes:
        timeout_s: a wait fails when no byte has moved for so long; None for never.
        moved_s: when bytes last moved, in `time.perf_counter()` seconds; the store keeps it up to date.
        gatherer: moves several writes at once; set by a store that can, before its first ticket.
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
        self.gatherer: Gatherer | None = None
        self.on_forked = on_forked
        self._name = f"{name}-{next(_number)}"
        self._reads: deque[Ticket] = deque()
        self._writes: deque[Ticket] = deque()
        self._tokens: SimpleQueue[bool] = SimpleQueue()  # one True per job; False ends a worker
        self._desks = [Desk() for _ in range(count)]
        self._lock = threading.Lock()  # for starting and ending threads
        self._on_stopped = on_stopped
        self._open = False  # there are threads, and they take tickets
        self._stopping = False
        self._refusal = "the store is closed; make a new one"
        self._forked = self._frozen = False
        self._running = 0
        self._deaths = 0
        _fork.register(self)

    # -- for stores ----------------------------------------------------------------------------------------------

    def submit(self, ticket: Ticket, *, urgent: bool) -> None:
        """Queue a ticket. Raises StoreClosed after `stop`, StoreBroken once too many workers have died."""
        if not self._open:
            self._begin()
        ticket.watch = self
        (self._reads if urgent else self._writes).append(ticket)
        self._tokens.put(True)
        if self._stopping and not self._running:  # stopped between the check and here: nobody is left to take it
            self._fail_queued(Desk())

    def refuse(self) -> None:
        """Raise StoreClosed after `stop`, StoreBroken once too many workers have died."""
        if self._stopping:
            raise (StoreClosed if self._deaths <= MOST_DEATHS else StoreBroken)(self._refusal)

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
        if not any(desk.thread for desk in self._desks):
            self._on_stopped()
        self._end_threads()

    def join(self) -> None:
        """Wait until the threads have ended (not from one of them), unless nothing moves any more."""
        if self._frozen:
            return
        begun_s = time.perf_counter()
        with self._lock:
            pass  # whoever is starting threads has started them all
        for desk in self._desks:
            while True:
                thread = desk.thread
                if thread is None or thread is threading.current_thread():
                    break
                thread.join(self.period_s)
                if thread is desk.thread and (not thread.is_alive() or self.stalled_s(begun_s)):
                    break

    @contextmanager
    def held(self) -> Iterator[None]:
        """No ticket runs inside, except one that has stalled."""
        begun_s = time.perf_counter()
        with ExitStack() as stack:
            for desk in self._desks:
                while not desk.busy.acquire(timeout=self.period_s):
                    if self.stalled_s(begun_s):
                        break
                else:
                    stack.callback(desk.busy.release)
            yield

    def forget(self) -> None:
        """In a forked child: the threads do not exist here; take nothing more."""
        self._open, self._stopping, self._forked = False, True, True
        self._lock = threading.Lock()  # another thread may have held it
        self._desks = []
        self._running = 0
        self.on_forked()

    def freeze(self, deadline_s: float) -> None:
        """At the interpreter's exit: no ticket is begun any more; running ones may end until then."""
        self._open, self._stopping, self._frozen = False, True, True
        for desk in self._desks:
            desk.busy.acquire(timeout=max(0.0, deadline_s - time.monotonic()))  # and never released

    # -- for those who wait (`Watch`) ----------------------------------------------------------------------------

    @property
    def period_s(self) -> float:
        return _PERIOD_S if self.timeout_s is None else min(_PERIOD_S, self.timeout_s / 4)

    def check(self, ticket: Ticket, since_s: float) -> None:
        if self._forked:
            raise StoreClosed("a transfer of the parent process cannot be waited for in a forked child")
        if self._frozen and not ticket.done():
            raise StoreClosed("the interpreter is exiting: nothing is transferred any more")
        if not self._has(ticket) and not ticket.done():
            raise StoreBroken(f"the worker that had the transfer of {ticket.nbytes} bytes is gone")
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

    def _has(self, ticket: Ticket) -> bool:
        # In the order a ticket goes: what was taken from a queue before it was looked at is at a desk by now.
        if ticket in self._reads or ticket in self._writes:
            return True
        return any(desk.has(ticket) for desk in self._desks)

    # -- threads -------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        with self._lock:
            if not self._stopping and not self._open:
                self._running = len(self._desks)
                for desk in self._desks:
                    self._seat(desk)
                self._open = True
                if self._stopping:  # meanwhile, by somebody who saw no thread, or not all, to end
                    self._open = False
                    self._end_threads()
                    return
        self.refuse()

    def _seat(self, desk: Desk) -> None:
        name = f"{self._name}-{self._desks.index(desk)}"
        desk.thread = threading.Thread(target=self._loop, args=(desk,), name=name, daemon=True)
        desk.thread.start()

    def _end_threads(self) -> None:
        for _ in self._desks:
            self._tokens.put(False)

    def _loop(self, desk: Desk) -> None:
        try:
            while self._tokens.get():
                with desk.busy:
                    self._run_next(desk)
                    desk.jobs.clear()
        except BaseException as error:  # the ticket it strikes tells of it; where it strikes none, nothing is lost
            self._bury(desk, error)
        else:
            self._leave(desk)

    def _run_next(self, desk: Desk) -> bool:
        # A function of its own: its locals end with it, so an idle worker keeps nothing alive.
        if self._frozen:
            return False
        while queue := self._reads or self._writes:
            ticket: Ticket | None = desk.take(queue)
            if ticket is not None:  # else another worker was faster
                break
        else:
            return False
        if self.gatherer is not None and queue is self._writes and queue and not any(d.idle for d in self._desks):
            self._run_together(self.gatherer, ticket, desk)
        else:
            self._run(ticket)
        return True

    def _run(self, ticket: Ticket) -> None:
        if ticket.start():
            self._run_started(ticket)

    def _run_started(self, ticket: Ticket) -> None:
        if self._stopping:
            ticket.error = self._closing_error()
            ticket.finish()
        else:
            ticket.run(time.perf_counter)
            self.moved_s = ticket.ended_s

    def _run_together(self, gatherer: Gatherer, first: Ticket, desk: Desk) -> None:
        """Run a write and those behind it in the queue that go with it."""
        tickets, other = [first], None
        if gatherer.takes([], first):
            while (another := _peek(self._writes)) is not None and gatherer.takes(tickets, another):
                taken = desk.take(self._writes)
                if taken is not another:  # another worker took that, and this may be one that goes alone
                    other = taken
                    break
                tickets.append(taken)
        started = [ticket for ticket in tickets if ticket.start()]
        started_s = time.perf_counter()
        if len(started) > 1 and not self._stopping and _written(gatherer, started):
            self.moved_s = ended_s = time.perf_counter()
            for ticket in started:
                ticket.started_s, ticket.ended_s = started_s, ended_s
                ticket.finish()
        else:
            for ticket in started:
                while (read := desk.take(self._reads)) is not None:  # ahead of writes, here as well
                    self._run(read)
                self._run_started(ticket)
        if other is not None:
            self._run(other)

    def _bury(self, desk: Desk, cause: BaseException) -> None:
        """The thread at this desk is dying: put another there, or give up, and then end what it had."""
        jobs, desk.jobs = desk.jobs, []
        with self._lock:
            self._deaths += 1
            goes_on = not self._stopping and self._deaths <= MOST_DEATHS
            if goes_on:
                self._seat(desk)
                self._tokens.put(True)  # the dead one may have used up a token and left its ticket in the queue
            elif not self._stopping:
                self._refusal = f"{self._deaths} workers of the store died, the last of {cause!r}; make a new one"
                self._open, self._stopping = False, True
                self._end_threads()
        _abort(jobs, cause)
        if not goes_on:
            self._leave(desk)

    def _leave(self, desk: Desk) -> None:
        with self._lock:
            self._running -= 1
            last = self._running == 0
        if last:
            self._fail_queued(desk)
            self._on_stopped()

    def _fail_queued(self, desk: Desk) -> None:
        more = True
        while more:
            try:
                more = self._run_next(desk)
            except BaseException as error:
                _abort(desk.jobs, error)
            desk.jobs.clear()

    def _closing_error(self) -> StoreError:
        if self._deaths > MOST_DEATHS:
            return StoreBroken(self._refusal)
        return StoreClosed("the store was closed before this transfer started")


def _peek(queue: deque[Ticket]) -> Ticket | None:
    try:
        return queue[0]
    except IndexError:
        return None


def _written(gatherer: Gatherer, tickets: list[Ticket]) -> bool:
    try:
        gatherer.write(tickets)
    except BaseException:  # even SystemExit, as in `Ticket.run`: it comes again where it is one of these tickets' own
        return False
    return True


def _abort(jobs: list[object], cause: BaseException) -> None:
    for job in jobs:
        if isinstance(job, Ticket):
            error = StoreBroken(f"the worker that had the transfer of {job.nbytes} bytes died: {cause!r}")
            error.__cause__ = cause.with_traceback(None)  # its frames would keep what the ticket lets go
            job.abort(error)
