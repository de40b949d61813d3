"""Interrupts: a Ctrl-C that strikes while the engine's own code runs is delivered when that code can be left.

CPython calls signal handlers between two bytecodes of the main thread, and the usual ones raise there: SIGINT's
KeyboardInterrupt, the error of a time limit for SIGALRM. What was running is torn in two, and no order of statements is
safe from that everywhere. So, in the manner of trio (`trio/_core/_ki.py`), a handler of ours stands in front of the
program's while there is something to tear:

    signal -> `_Front` -> is the innermost frame of protected code on the stack?
                            no:  the program's handler is called, at once
                            yes: it is noted in `pending`; `deliver` calls the program's handler

Guarantees:

1. Between `arm` and `disarm` the program's handler does not run in the midst of protected code. It runs at `deliver`,
   which protected code calls where it may be left: at the end of every call from outside, and while it waits.
2. A signal is never lost. Where protected code ends without `deliver` (a callback of a weak reference), a thread raises
   it again every few milliseconds until it meets other code.
3. Outside of `arm` and `disarm` the program's handlers are in place as it has set them. A handler that it sets in
   between is left alone, until the next `arm` stands in front of that one.

Assumptions: protected code is told by the file it stands in; what it calls and waits for in the C library returns
within moments. Signals are handled on the main thread only, so others need no protection.
"""

from __future__ import annotations

import _thread
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

Handler = Callable[[int, FrameType | None], Any]

# Those whose handlers raise, in programs that live on.
_SIGNALS = tuple(int(getattr(signal, name)) for name in ("SIGINT", "SIGTERM", "SIGALRM") if hasattr(signal, name))
_REMIND_S = 0.002
# As they are in C: the module's own take 4 us a call, to make members of an enum.
_get: Callable[[int], Any] = getattr(signal.getsignal, "__wrapped__", signal.getsignal)
_trip: Callable[..., None] = _thread.interrupt_main
_set: Callable[[int, Handler], Any] = getattr(signal.signal, "__wrapped__", signal.signal)

pending: list[tuple[int, Handler]] = []  # what is still to be delivered: the signal, and the program's handler

_protected: tuple[str, ...] = ()  # beginnings of file names
_unprotected: tuple[str, ...] = ()  # the same of exceptions
_lets_through: set[CodeType] = set()
_armed = 0
_reminded = False  # whether a signal comes from `_remind`


def protect(package: str, *, but: tuple[str, ...] = ()) -> None:
    """Protect the code in a package's folder, but for what begins with one of the paths `but` in it."""
    global _protected, _unprotected
    _protected = (*_protected, os.path.join(package, ""))
    _unprotected = (*_unprotected, *(os.path.join(package, path) for path in but))


def lets_through(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a protected function that calls code of the program: what it calls may be interrupted, it may not."""
    _lets_through.add(function.__code__)
    return function


def whole(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a protected function that the program calls: an interrupt comes before it or after it."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        armed = False
        try:
            armed = arm()
            return function(*args, **kwargs)
        finally:
            if armed:
                disarm()
            if pending and not _is_protected(sys._getframe(1)):
                deliver()

    return run


def on_main_thread() -> bool:
    """Whether this is the thread that signals are handled on."""
    return threading.get_ident() == threading.main_thread().ident


def arm() -> bool:
    """Stand in front of the program's handlers, until `disarm`. False, and nothing is done, off the main thread."""
    global _armed
    if not on_main_thread():
        return False
    for number in _SIGNALS:  # SIGINT first: from then on this is protected itself
        handler = _get(number)
        if callable(handler) and not isinstance(handler, _Front):
            _set(number, _Front(handler))
    _armed += 1
    return True


def disarm() -> None:
    """Give the program its handlers back, once `disarm` was called as often as `arm`. Nothing off the main thread."""
    global _armed
    if not on_main_thread() or not _armed:
        return
    _armed -= 1
    if not _armed:
        for number in reversed(_SIGNALS):
            handler = _get(number)
            if isinstance(handler, _Front):
                _set(number, handler.program)


def waiting() -> bool:
    """Whether this thread has a signal to deliver: what it waits for may be given up."""
    return bool(pending) and on_main_thread()


def deliver() -> None:
    """Call the program's handlers for all pending signals, which may raise. Does nothing off the main thread."""
    while waiting():
        number, program = pending.pop(0)
        program(number, sys._getframe(1))


def absorb() -> bool:
    """`deliver` in code that waits and cannot be left: whether a handler has raised, which the next `deliver` does."""
    try:
        deliver()
    except BaseException as error:
        pending.insert(0, (0, functools.partial(_raise, error)))
    return waiting()


def _raise(error: BaseException, *_: object) -> None:
    raise error


class _Front:
    """Stands in front of one handler of the program."""

    def __init__(self, program: Handler) -> None:
        self.program = program

    def __call__(self, number: int, frame: FrameType | None) -> None:
        global _reminded
        reminded, _reminded = _reminded, False
        if not reminded and not any(number == one for one, _ in pending):
            if not pending and _is_protected(frame):
                _thread.start_new_thread(_remind, ())
            pending.append((number, self.program))
        if pending and not _is_protected(frame):
            number, program = pending.pop(0)
            program(number, frame)
            deliver()


def _is_protected(frame: FrameType | None) -> bool:
    innermost = frame
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        if file.startswith(_protected) and not file.startswith(_unprotected):
            return frame is innermost or code not in _lets_through
        frame = frame.f_back
    return False


def _remind() -> None:
    """On a thread of its own: raise what is pending again until it has been delivered.

    From the look at `pending` to the signal the interpreter does not switch threads, as it does so only where it looks
    for signals too. The main thread may still deliver before it looks: `_reminded` tells `_Front` of that.
    """
    global _reminded
    while pending:
        time.sleep(_REMIND_S)
        if pending and _armed:
            _reminded = True
            _trip(pending[0][0] or signal.SIGINT)
        elif pending and pending[0][0]:  # the program's handler is in place
            _trip(pending.pop(0)[0])


protect(os.path.dirname(__file__))
os.register_at_fork(after_in_child=pending.clear)  # the parent's
