"""Interrupts: a signal that strikes while the engine's own code runs is handled when the program's code goes on.

CPython calls a signal's handler, if that is a Python function, between two bytecodes of the main thread. It may raise
there (SIGINT's KeyboardInterrupt, a time limit, PyTorch's word that a DataLoader's worker was killed), and it may do
anything else a program does: evaluate, save, train. Without us it never comes in the midst of an operator. Our hooks
are Python code in the midst of operators, and so a handler of ours stands in front of each of the program's while there
are any:

    signal -> `_Front` -> is the innermost frame of protected code on the stack?
                            no:  the program's handler is called, at once
                            yes: the signal's number goes to `pending`; it strikes again once that code is left

Guarantees:

1. Between `arm` and `disarm` no handler of the program runs in the midst of protected code, but for a wait (`look`).
2. A signal is never lost, and no handler is called more often than its signal came; of one number one may wait, as in
   the system. A signal is in `pending` or tripped in the interpreter, never in neither: `again` takes it from one to
   the other, in C. Whatever puts it into `pending` also starts a thread that takes it out after a
   moment, so that it does not matter who else does, or whether anybody does.
3. What a handler raises reaches the program as it is. In a wait, what runs around it may take the error for its own: so
   there it is put into `kept`, the wait ends, and whoever leaves protected code raises it.
4. Outside of `arm` and `disarm` the program's handlers are in place as it has set them. A handler that it sets in
   between is left alone, until the next `arm` stands in front of that one.

The simpler design was tried: no handler is replaced, each change of the engine is one assignment or is undone, a call
that comes back in is seen at the door, and what could not be undone marks the engine as torn. The door and the mark are
there (`tba._engine.saver`), for what no front can hold back: finalisers, trace functions, debuggers. They do not do for
signals, whatever is done for the engine's state:

- Inside a hook autograd records nothing: of 91 handlers that trained, under hooks that did nothing but pass 2 us, 74
  failed with "does not require grad"; of 21 without hooks none did. A handler has to wait for the operator's end.
- A handler that raises as a `with` statement's `__exit__` begins leaves the hooks on for good, and where
  `Condition.wait` has let go of its lock it leaves that to nobody. Neither can be undone from inside.
- Each interrupt that is survived would cost an engine: its plan, its order, its file.

Assumptions: protected code is told by the file it stands in; what it calls and waits for in the C library returns
within moments. Signals are handled on the main thread only, so others need no protection. asyncio's handler, which does
nothing, is left where it is: the interpreter writes to its descriptor each time that a signal strikes.
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
# SIGINT first: from then on `arm` is protected itself from the one that most programs have.
_SIGNALS = (int(signal.SIGINT), *sorted({int(number) for number in signal.valid_signals()} - _NEVER - {signal.SIGINT}))
_STRIKE_AGAIN_S = 0.002
_ASYNCIO = "asyncio.unix_events"
# As they are in C: the module's own take 4 us a call, to make members of an enum.
_get: Callable[[int], Any] = getattr(sys.modules.get("_signal"), "getsignal", signal.getsignal)
_set: Callable[[int, Handler], Any] = getattr(sys.modules.get("_signal"), "signal", signal.signal)

tracer: Callable[[], object] = sys.gettrace  # gives what traces this thread, for `pass_on`
_trip: Callable[[int], None] = getattr(_thread, "interrupt_main")  # noqa: B009  # its stub knows an enum only

pending: deque[int] = deque()  # the numbers of signals that are still to strike again
kept: list[BaseException] = []  # what handlers have raised in waits, for those who leave protected code

_protected: tuple[str, ...] = ()  # beginnings of file names
_unprotected: tuple[str, ...] = ()  # the same of exceptions
_lets_through: set[CodeType] = set()
_takes_errors: set[CodeType] = set()
_apart: Callable[[bool], AbstractContextManager[None]] = nullcontext  # type: ignore[assignment]  # with a bool in it
_beside = ""
_armed = 0


class _Again:
    """`[*again]` has all pending signals strike again, oldest first: a sequence whose items are their going.

    It is no call, as after a call the interpreter looks for signals: what strikes is met where the function that says
    so returns to, if it is the last that it does. `popleft`, `interrupt_main` and all between are C, so that neither
    another thread nor a handler comes between.
    """

    __getitem__ = staticmethod(functools.partial(next, map(_trip, iter(pending.popleft, None))))


again: Iterable[None] = _Again()  # type: ignore[assignment]  # mypy wants an `__iter__` of what is iterated over


def protect(package: str, *, but: tuple[str, ...] = ()) -> None:
    """Protect the code in a package's folder, but for what begins with one of the paths `but` in it."""
    global _protected, _unprotected
    _protected = (*_protected, os.path.join(package, ""))
    _unprotected = (*_unprotected, *(os.path.join(package, path) for path in but))


def run_apart(apart: Callable[[bool], AbstractContextManager[None]], *, beside: str) -> None:
    """Set what a handler runs in that is called while protected code is on the stack.

    Args:
        apart: makes it, for a handler in code of the program that protected code calls (False), or in a wait (True).
        beside: a file of PyTorch's which works for such code: protected too, with what it calls of PyTorch's.
    """
    global _apart, _beside
    _apart, _beside = apart, beside


def lets_through(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a protected function that calls code of the program: what it calls may be interrupted, it may not.

    Where other protected functions call it in their turn, nothing is: they may take an error for their own.
    """
    _lets_through.add(function.__code__)
    return function


def takes_errors(code: CodeType) -> None:
    """Protect a function of others where it handles an error: it would take what a handler raises there for its own."""
    _takes_errors.add(code)


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
    """Stand in front of the program's handlers, until `disarm`. False, and nothing is done, off the main thread."""
    global _armed
    if not on_main_thread():
        return False
    _armed += 1
    try:
        for number, handler in zip(_SIGNALS, map(_get, _SIGNALS), strict=True):
            # Neither what stands for "ignored" and "default", nor what was not set from Python.
            if type(handler) is not int and handler is not None and type(handler) is not _Front and _acts(handler):
                _set(number, _Front(handler))
    except BaseException:  # a handler that none of ours stands in front of yet
        disarm()
        raise
    return True


def disarm(*, leaves: bool = True) -> None:
    """Give the program its handlers back, once `disarm` was called as often as `arm`. Nothing off the main thread.

    If the caller `leaves` protected code with it, what is pending strikes at once.
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
    """Give the program its handlers back, however often `arm` was called: some `disarm` was torn off."""
    while _armed and on_main_thread():
        disarm(leaves=False)


def overdue(known: int) -> bool:
    """Whether a `disarm` was torn off: but for `known` calls `arm` has its own, and nothing that arms is under way."""
    return _armed > known and on_main_thread() and not in_midst()


def in_midst() -> bool:
    """Whether the code of the program's or of PyTorch's that has called protected code was called by some itself."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith((*_protected, *_wrappers())):
        frame = frame.f_back
    return any(_stands(frame))


def look() -> None:
    """In a wait that lasts: call the program's handlers for pending signals. Does nothing off the main thread.

    What they raise is `kept`: ask `waiting` whether to wait on.
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
    """Whether a handler has raised on this thread, so that no wait goes on and protected code is to be left."""
    return bool(kept) and on_main_thread()


def throw() -> None:
    """Raise what a handler has raised in a wait. For whoever leaves protected code."""
    if not waiting():
        return
    error = kept.pop(0)
    context = error.__context__
    try:
        raise error
    finally:
        error.__context__ = context  # not the error by which the wait has ended, if that is being handled


def pass_on(error: BaseException, tracer: object) -> None:
    """Raise an error again if a trace function has raised it, where one of PyTorch's or a store's is expected.

    The interpreter takes a trace function off that raises, so it is not the `tracer` of before then.
    """
    if sys.gettrace() is not tracer:
        raise error


def pass_on_from_call(error: BaseException) -> None:
    """The same where the error of one call of C is expected, so often that nobody asks for a tracer before."""
    if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
        raise error


def is_foreign(error: BaseException) -> bool:
    """Whether an error was raised by code that we do not call, such as a trace function, to tell it from our own.

    Ours are raised in protected code, or in what that calls: PyTorch, Python's library.
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
    """The folders and files of what we call."""
    folders = (getattr(sys.modules.get(name), "__file__", None) for name in ("compact", "torch", "numpy"))
    files = (contextlib.__file__, threading.__file__, weakref.__file__, functools.__file__)
    return (*files, *(os.path.join(os.path.dirname(file), "") for file in folders if file))


@functools.cache
def _wrappers() -> tuple[str, ...]:
    """The file and the folder of what `torch.compile` puts around functions that it leaves alone."""
    folder = os.path.dirname(getattr(sys.modules.get("torch"), "__file__", None) or "")
    return (os.path.join(folder, "_compile.py"), os.path.join(folder, "_dynamo", "")) if folder else ()


def _acts(handler: Any) -> bool:
    return getattr(handler, "__module__", None) != _ASYNCIO


class _Front:
    """Stands in front of one handler of the program."""

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
        return  # that it came is known, and it has not struck again yet
    pending.append(number)
    with suppress(RuntimeError):  # no thread is to be had: whoever leaves protected code sees to it
        _thread.start_new_thread(_strike_again, ())


def _strike_again() -> None:
    """On a thread of its own: have what is pending strike again in a moment. In protected code that comes to us."""
    time.sleep(_STRIKE_AGAIN_S)
    _ = [*again]


def _stands(frame: FrameType | None) -> tuple[bool, bool]:
    """Whether code stands within protected code, and else whether it was called by some that lets it through."""
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
