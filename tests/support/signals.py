"""Signals at chosen places: at each point of some code where CPython looks for signals, one real SIGINT.

The interpreter looks at a function's entry, after a call and at a jump backward. `places` runs something once and notes
each such point that it passes in the files given; `interrupted_at` runs it again, with a signal raised at one of them.
"""

from __future__ import annotations

import dis
import functools
import signal
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NamedTuple

from io_backends import interrupts
from support.opcodes import each_opcode, run_traced


class Place(NamedTuple):
    """An instruction of a code object."""

    code: CodeType
    offset: int

    @property
    def is_first(self) -> bool:
        """Whether the function has only been entered."""
        return self.offset == min(_points(self.code))

    def __str__(self) -> str:
        line = next((at[2] for at in self.code.co_lines() if at[0] <= self.offset < at[1]), None)
        return f"{self.code.co_filename}:{line} in {self.code.co_qualname} at {self.offset}"


@functools.cache
def _points(code: CodeType) -> frozenset[int]:
    """The instructions at which a signal can be raised to the effect of one at a place where the interpreter looks.

    What it finds after a call it raises there, at the call. Raised at the next instruction instead that has the same
    effect if the same handler catches it, so other instructions are left out.
    """
    found, before = set(), None
    ranges = [(entry.start, entry.end, entry.target) for entry in dis._parse_exception_table(code)]  # type: ignore[attr-defined]

    def handler(offset: int) -> int | None:
        return next((target for start, end, target in ranges if start <= offset < end), None)

    for instruction in dis.get_instructions(code):
        offset = instruction.offset
        looked = before is not None and before.opname in ("RESUME", "CALL", "CALL_FUNCTION_EX", "CALL_KW")
        if looked and before is not None and handler(before.offset) == handler(offset):
            found.add(offset)
        if instruction.opname.startswith("JUMP_BACKWARD"):
            found.add(offset)
        before = instruction
    return frozenset(found)


def places(run: Callable[[], object], prefixes: tuple[str, ...]) -> list[Place]:
    """Every place that `run` passes on this thread in files whose names begin so, once each, in order."""
    found: dict[Place, None] = {}

    def local(frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode" and frame.f_lasti in _points(frame.f_code):
            found[Place(frame.f_code, frame.f_lasti)] = None
        return local

    def tracer(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(prefixes):
            return None
        return each_opcode(frame, local)

    run_traced(run, tracer)
    return list(found)


def interrupted_at(place: Place, run: Callable[[], object], *, number: int = 0) -> bool:
    """Run with a SIGINT at the `number`-th time that it passes the place. Whether KeyboardInterrupt was raised."""
    try:
        at(place, run, lambda: signal.raise_signal(signal.SIGINT), number=number)
        while interrupts.pending:  # one that nobody has strike again does so by itself
            time.sleep(0.001)
    except KeyboardInterrupt:
        return True
    return False


def at(place: Place, run: Callable[[], object], happens: Callable[[], object], *, number: int = 0) -> bool:
    """Run, and have something happen in a trace function the `number`-th time that it passes the place; whether it did.

    What that raises the interpreter raises at the place.
    """
    passed = 0

    def local(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal passed
        if event == "opcode" and frame.f_lasti == place.offset:
            passed += 1
            if passed == number + 1:
                happens()
        return local

    def tracer(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code is not place.code:
            return None
        return each_opcode(frame, local)

    run_traced(run, tracer)
    return passed > number
