"""Interrupts: a signal that arrives while the engine's own code runs is handled once the program's code continues.

CPython calls a signal handler written in Python between two bytecodes of the main thread. The handler may raise
(SIGINT's KeyboardInterrupt, a time limit, a DataLoader worker's death) or do anything else: evaluate, save, train. In
plain PyTorch it never runs in the middle of an operator. Our hooks are Python code in the middle of operators, so while
there are any, a handler of ours stands in front of each of the program's:

    signal -> `_Front` -> is the innermost frame of protected code on the stack?
                            no:  call the program's handler at once
                            yes: put the signal into `pending`; it strikes again after that code has returned

Guarantees:

1. Between `arm` and `disarm` no handler of the program runs within protected code, except in a wait (`look`).
2. No signal is lost, and no handler runs more often than its signal arrived. As in the kernel, one signal of each
   number may be pending. A signal is either in `pending` or tripped in the interpreter: `again` moves it from one to
   the other in C. Whoever adds to `pending` also starts a thread that empties it after a moment, so nobody else has to.
3. What a handler raises reaches the program unchanged. In a wait, surrounding code could mistake the error for its own,
   so it goes into `kept`, the wait ends, and the code that leaves protected code raises it.
4. Outside of `arm` and `disarm` the program's own handlers are in place. A handler that it sets in between stays until
   the next `arm` stands in front of it.

A simpler design was tried: no handler is replaced, each change of the engine is one assignment or is undone, reentry is
detected, and what cannot be undone marks the engine as torn. Reentry checks and the mark remain (`tba._engine.saver`)
for what no front can hold back: finalizers, trace functions, debuggers. They do not suffice for signals:

- Inside a hook autograd records nothing. Of 91 handlers that trained, under hooks that did nothing for 2 us, 74 failed
  with "does not require grad"; of 21 without hooks none did. A handler has to wait for the operator's end.
- A handler that raises as a `with` statement's `__exit__` begins leaves the hooks on for good. Where `Condition.wait`
  has released its lock, the lock stays unowned. Neither can be undone from inside.
- Each survived interrupt would cost an engine: its plan, its order, its file.

Assumptions: a frame's file tells whether its code is protected; C code that protected code calls or waits for returns
within moments. Only the main thread handles signals, so other threads need no protection. asyncio's handler does
nothing (the interpreter writes to its descriptor at each signal) and is left in place.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import os
import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

Handler = Callable[[int, FrameType | None], Any]

_NEVER = {int(getattr(signal, name)) for name in ("SIGKILL", "SIGSTOP") if hasattr(signal, name)}
# SIGINT first: after it `arm` itself is protected from the handler that most programs have.
_SIGNALS = (int(signal.SIGINT), *sorted({int(number) for number in signal.valid_signals()} - _NEVER - {signal.SIGINT}))
_STRIKE_AGAIN_S = 0.002
_ASYNCIO = "asyncio.unix_events"
# The C functions: the module's own take 4 us a call to make enum members.
_get: Callable[[int], Any] = getattr(sys.modules.get("_signal"), "getsignal", signal.getsignal)
_set: Callable[[int, Handler], Any] = getattr(sys.modules.get("_signal"), "signal", signal.signal)

tracer: Callable[[], object] = sys.gettrace  # this thread's trace function, for `pass_on`
_trip: Callable[[int], None] = getattr(_thread, "interrupt_main")  # noqa: B009  # its stub knows an enum only

pending: deque[int] = deque()  # signals that are to strike again
kept: list[BaseException] = []  # raised by handlers in waits; whoever leaves protected code raises it

_protected: tuple[str, ...] = ()  # prefixes of file names
_unprotected: tuple[str, ...] = ()  # prefixes of exceptions to these
_lets_through: set[CodeType] = set()
_takes_errors: set[CodeType] = set()
_apart: Callable[[bool], AbstractContextManager[None]] = nullcontext  # type: ignore[assignment]  # with a bool in it
_beside = ""
_armed = 0


class _Again:
    """`[*again]` makes all pending signals strike again, oldest first: it is a sequence whose items are their removal.

    It is not a call, because the interpreter checks for signals after a call; a signal is handled only after the
    function whose last act this is has returned. `popleft`, `interrupt_main` and all between are C, so no other thread
    or handler interferes.
    """

    __getitem__ = staticmethod(functools.partial(next, map(_trip, iter(pending.popleft, None))))


again: Iterable[None] = _Again()  # type: ignore[assignment]  # mypy wants an `__iter__` of what is iterated over


def protect(package: str, *, but: tuple[str, ...] = ()) -> None:
    """Protect the code in a package's folder, except paths in it that begin with one of `but`."""
    global _protected, _unprotected
    _protected = (*_protected, os.path.join(package, ""))
    _unprotected = (*_unprotected, *(os.path.join(package, path) for path in but))


def run_apart(apart: Callable[[bool], AbstractContextManager[None]], *, beside: str) -> None:
    """Set the context for handlers called while protected code is on the stack.

    Args:
        apart: makes it, for a handler in code of the program that protected code calls (False), or in a wait (True).
        beside: a file of PyTorch's that works for such code. It is protected, and so is what it calls of PyTorch's.
    """
    global _apart, _beside
    _apart, _beside = apart, beside


def lets_through(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a protected function that calls the program's code: that code may be interrupted, this function may not.

    If another protected function calls it, nothing may be: callers may mistake the error for their own.
    """
    _lets_through.add(function.__code__)
    return function


def takes_errors(code: CodeType) -> None:
    """Protect a foreign function while it handles an error: it would mistake what a handler raises for its own."""
    _takes_errors.add(code)


def whole(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a protected function that the program calls: interrupts come before it or after it."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        armed = False
        try:
            armed = arm()
            return function(*args, **kwargs)
        finally:
            if armed:
                disarm(leaves=False)
            if kept:
                throw()
            if pending:
                _ = [*again]

    return run


def on_main_thread() -> bool:
    """Whether this is the thread that signals are handled on."""
    return threading.get_ident() == threading.main_thread().ident


def arm() -> bool:
    """Stand in front of the program's handlers until `disarm`. False, with nothing done, off the main thread."""
    global _armed
    if not on_main_thread():
        return False
    _armed += 1
    try:
        for number, handler in zip(_SIGNALS, map(_get, _SIGNALS), strict=True):
            # Not the constants for "ignore" and "default", nor handlers that were not set from Python.
            if type(handler) is not int and handler is not None and type(handler) is not _Front and _acts(handler):
                _set(number, _Front(handler))
    except BaseException:  # from a handler without a front so far
        disarm()
        raise
    return True


def disarm(*, leaves: bool = True) -> None:
    """Give the program its handlers back after as many calls as of `arm`. Does nothing off the main thread.

    If the caller `leaves` protected code, pending signals strike at once.
    """
    global _armed
    if not on_main_thread() or not _armed:
        return
    _armed -= 1
    if not _armed:
        for number, handler in zip(reversed(_SIGNALS), map(_get, reversed(_SIGNALS)), strict=True):
            if type(handler) is _Front:
                _set(number, handler.program)
        if leaves and pending:
            _ = [*again]


def reset() -> None:
    """Give the program its handlers back, however often `arm` was called: a `disarm` was interrupted."""
    while _armed and on_main_thread():
        disarm(leaves=False)


def overdue(known: int) -> bool:
    """Whether a `disarm` was interrupted: more than `known` calls of `arm` are open, and nothing that arms runs."""
    return _armed > known and on_main_thread() and not in_midst()


def in_midst() -> bool:
    """Whether the code that called protected code was itself called by protected code."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith((*_protected, *_wrappers())):
        frame = frame.f_back
    return any(_stands(frame))


def look() -> None:
    """In a long wait: call the program's handlers for pending signals. Does nothing off the main thread.

    Their errors go into `kept`; `waiting` says whether to wait on.
    """
    while pending and on_main_thread():
        number = pending.popleft()
        handler = _get(number)
        if type(handler) is _Front:
            handler = handler.program
        if not callable(handler):
            continue
        try:
            with _apart(True):
                handler(number, sys._getframe(1))
        except BaseException as error:
            kept.append(error)


def waiting() -> bool:
    """Whether a handler has raised on this thread, so that waits end and protected code returns."""
    return bool(kept) and on_main_thread()


def throw() -> None:
    """Raise what a handler raised in a wait. For whoever leaves protected code."""
    if not waiting():
        return
    error = kept.pop(0)
    context = error.__context__
    try:
        raise error
    finally:
        error.__context__ = context  # not the error that ended the wait, if that is being handled


def pass_on(error: BaseException, tracer: object) -> None:
    """Raise an error again if a trace function raised it where an error of PyTorch's or a store's is expected.

    The interpreter removes a trace function that raises, so the current one differs from `tracer`, that of before.
    """
    if sys.gettrace() is not tracer:
        raise error


def pass_on_from_call(error: BaseException) -> None:
    """As `pass_on`, around a single C call that is too frequent to look up the trace function before it."""
    if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
        raise error


def is_foreign(error: BaseException) -> bool:
    """Whether code that we do not call, such as a trace function, raised an error.

    Our errors come from protected code or from what that calls: PyTorch, the standard library.
    """
    at = error.__traceback__
    if at is None:
        return False
    while at.tb_next is not None:
        at = at.tb_next
    file = at.tb_frame.f_code.co_filename
    return not file.startswith(("<frozen", *_protected, *_known_files()))


@functools.cache
def _known_files() -> tuple[str, ...]:
    folders = (getattr(sys.modules.get(name), "__file__", None) for name in ("compact", "torch", "numpy"))
    files = (contextlib.__file__, threading.__file__, weakref.__file__, functools.__file__)
    return (*files, *(os.path.join(os.path.dirname(file), "") for file in folders if file))


@functools.cache
def _wrappers() -> tuple[str, ...]:
    """File and folder of what `torch.compile` puts around functions that it leaves alone."""
    folder = os.path.dirname(getattr(sys.modules.get("torch"), "__file__", None) or "")
    return (os.path.join(folder, "_compile.py"), os.path.join(folder, "_dynamo", "")) if folder else ()


def _acts(handler: Any) -> bool:
    return getattr(handler, "__module__", None) != _ASYNCIO


class _Front:
    def __init__(self, program: Handler) -> None:
        self.program = program

    def __call__(self, number: int, frame: FrameType | None) -> None:
        within, through = _stands(frame)
        if within:
            _put_off(number)
        elif through:
            with _apart(False):
                self.program(number, frame)
        else:
            self.program(number, frame)


def _put_off(number: int) -> None:
    if number in pending:
        return
    pending.append(number)
    with suppress(RuntimeError):  # no thread available: whoever leaves protected code does it
        _thread.start_new_thread(_strike_again, ())


def _strike_again() -> None:
    """On a thread of its own: make pending signals strike again in a moment. In protected code they come back here."""
    time.sleep(_STRIKE_AGAIN_S)
    _ = [*again]


def _stands(frame: FrameType | None) -> tuple[bool, bool]:
    """Whether code is within protected code; if not, whether protected code that lets signals through called it."""
    innermost = frame
    if frame is not None and frame.f_code in _takes_errors and sys.exc_info()[0] is not None:
        return True, False
    if _works_beside(frame):
        return True, False
    through = False
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        if file.startswith(_protected) and not file.startswith(_unprotected):
            if frame is innermost or code not in _lets_through:
                return True, False
            through = True
        frame = frame.f_back
    return False, through


def _works_beside(frame: FrameType | None) -> bool:
    while frame is not None:
        file = frame.f_code.co_filename
        if file == _beside:
            return True
        if not file.startswith(_known_files()):
            return False
        frame = frame.f_back
    return False


protect(os.path.dirname(__file__))
os.register_at_fork(after_in_child=pending.clear)  # the parent's
