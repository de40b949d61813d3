"""Fork: transfers rest while a process is copied, and the copy has none.

A fork with direct I/O in flight on private memory may tear pages (open(2), O_DIRECT, NOTES). So before a fork running
transfers are waited for and queued ones held; the parent goes on afterwards, and in the child the workers, whose
threads do not exist there, are told to forget them.

So they do for good at the interpreter's exit: a daemon thread that comes out of native code after that is ended in the
midst of it, which aborts the process if C++ is on its stack. Waiting for running transfers there has a limit.

One fork at a time: two threads that fork at once would each hold some of the workers and wait for the others.
"""

from __future__ import annotations

import abc
import atexit
import os
import threading
import time
import weakref
from contextlib import AbstractContextManager, ExitStack, nullcontext


class ForkAware(abc.ABC):
    """An object with threads, or with locks that a forked child must not wait for."""

    def heed_forks(self) -> None:
        """Be held at every fork from now on, for as long as it lives."""
        with _known_lock:
            _known.add(self)

    def held(self) -> AbstractContextManager[None]:
        """Nothing runs inside."""
        return nullcontext()

    @abc.abstractmethod
    def forget(self) -> None:
        """In the child: there are no threads."""

    def freeze(self, deadline_s: float) -> None:  # noqa: B027  # without threads nothing has to end
        """At the interpreter's exit: nothing is begun any more; what runs may end until then (`time.monotonic()`)."""


_known: weakref.WeakSet[ForkAware] = weakref.WeakSet()
_known_lock = threading.Lock()  # held for moments only: a worker may register others while a fork waits for it
_forking = threading.Lock()
_EXIT_S = 5.0  # a transfer takes milliseconds, and a device that hangs must not keep a program from ending
_held = ExitStack()  # of the fork under way


def _all_known() -> list[ForkAware]:
    with _known_lock:
        return list(_known)


def _before() -> None:
    _forking.acquire()
    for one in _all_known():
        _held.enter_context(one.held())


def _after_in_parent() -> None:
    _held.close()
    _forking.release()


def _after_in_child() -> None:
    global _known_lock
    _known_lock = threading.Lock()  # another thread may have held it
    _held.pop_all()  # those locks belong to threads that do not exist here
    for one in _all_known():
        one.forget()
    _forking.release()


def _at_exit() -> None:
    deadline_s = time.monotonic() + _EXIT_S
    with ExitStack() as stack:  # all of them, also where one fails
        for one in _all_known():
            stack.callback(one.freeze, deadline_s)


atexit.register(_at_exit)
os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
