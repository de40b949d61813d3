"""Fork: transfers pause while a process is copied, and the copy has none.

A fork with direct I/O in flight on private memory may tear pages (open(2), O_DIRECT, NOTES). So before a fork running
transfers are waited for and queued ones held. The parent resumes afterwards; in the child, where the threads do not
exist, the workers are told to forget them.

At the interpreter's exit transfers stop for good: a daemon thread that returns from native code after that is killed
there, which aborts the process if C++ is on its stack. Waiting for running transfers then has a limit.

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
        """Take part in every fork from now on."""
        with _known_lock:
            _known.add(self)

    def held(self) -> AbstractContextManager[None]:
        """Nothing runs inside."""
        return nullcontext()

    @abc.abstractmethod
    def forget(self) -> None:
        """In the child: there are no threads."""

    def freeze(self, deadline_s: float) -> None:  # noqa: B027  # without threads nothing has to end
        """At the interpreter's exit: begin nothing; what runs may end until then (`time.monotonic()`)."""


_known: weakref.WeakSet[ForkAware] = weakref.WeakSet()
_known_lock = threading.Lock()  # held only briefly: a worker may register others while a fork waits for it
_forking = threading.Lock()
_EXIT_S = 5.0  # a transfer takes milliseconds, and a hung device must not keep a program from ending
_held = ExitStack()  # of the fork in progress


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
    _held.pop_all()  # their locks belong to threads that do not exist here
    for one in _all_known():
        one.forget()
    _forking.release()


def _at_exit() -> None:
    deadline_s = time.monotonic() + _EXIT_S
    with ExitStack() as stack:  # all of them, even if one fails
        for one in _all_known():
            stack.callback(one.freeze, deadline_s)


atexit.register(_at_exit)
os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
