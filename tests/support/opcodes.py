"""Opcode tracing: a trace function that is called before each bytecode of the frames it asks for, on every Python."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

TraceFunction = Callable[[FrameType, str, Any], Any]


def each_opcode(frame: FrameType, local: TraceFunction) -> TraceFunction:
    """Have `local` called before each bytecode of the frame, and not for its lines. What a tracer returns."""
    frame.f_trace = local  # Python 3.13 looks for it when it is asked for opcodes, before the tracer has returned
    frame.f_trace_opcodes, frame.f_trace_lines = True, False
    return local


def run_traced(run: Callable[[], object], tracer: TraceFunction) -> None:
    """Run under a trace function, then under the one before."""
    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 has opcodes traced only if some frame had asked before
    sys.settrace(tracer)
    try:
        run()
    finally:
        sys.settrace(before)
