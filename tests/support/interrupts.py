"""Tools for tests of what an interrupt (Ctrl-C) leaves behind: an exception before every bytecode, each in its turn."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any, TypeVar

from support.opcodes import each_opcode, run_traced

T = TypeVar("T")


class Interrupt(BaseException):
    """Stands for KeyboardInterrupt, so that a real one still ends the test."""


def interrupted_everywhere(
    set_up: Callable[[], T], operate: Callable[[T], object], *modules: ModuleType
) -> Iterator[tuple[int, T]]:
    """Run `operate` on something that is set up anew each time, and interrupt it one bytecode later each time.

    Yields that number and what was operated on; ends after the first run that came to its end.

    Args:
        modules: those whose bytecodes count.
    """
    files = {module.__file__ for module in modules}
    for place in itertools.count():
        subject = set_up()
        if not _interrupted(lambda subject=subject: operate(subject), files, place):  # type: ignore[misc]
            assert place > 1, "nothing of these modules ran"
            return
        yield place, subject


def _interrupted(call: Callable[[], object], files: set[str | None], place: int) -> bool:
    seen = itertools.count()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        if event == "opcode" and next(seen) == place:
            raise Interrupt
        return each_opcode(frame, trace) if event == "call" else trace

    def alone() -> Iterator[bool]:
        try:
            run_traced(call, trace)
        except Interrupt:
            yield True
        yield False

    # The garbage of other tests is not collected meanwhile: Python only prints what a finalizer raises, so an interrupt
    # there would not end the call.
    gc.disable()
    try:
        # An interrupt amid the bytecodes that end an `except` leaves its error with whoever handles errors: a generator
        # has its own, and takes it along.
        return next(alone())
    finally:
        gc.enable()
