"""User frames: finds the user's own code on the stack, so that warnings and tracebacks point at it."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import sys
import threading
import warnings
from types import FrameType, TracebackType

import torch

import compact
import io_backends

from .._errors import OffloadWarning


def _directory(file: str) -> str:
    return os.path.join(os.path.dirname(os.path.abspath(file)), "")


# Besides our own packages: torch calls `attach`'s hooks, contextlib our generators.
_BETWEEN = (
    _directory(os.path.dirname(__file__)),
    *(_directory(file) for file in map(str, (compact.__file__, io_backends.__file__, torch.__file__))),
    *(_directory(importlib.__file__), contextlib.__file__, threading.__file__, "<frozen importlib"),
)


def between(file: str) -> bool:
    """Whether a file's code is not the user's, but calls or is called by ours."""
    return file.startswith(_BETWEEN)


def warn(message: str) -> None:
    """Give an OffloadWarning that points at the user's line: the `with`, the call or the forward that led here.

    No user code has called a worker's thread, so such a warning points at where the main thread is now.
    """
    # No name here may stay bound to a frame of ours: the frame would hold itself, and its callers what they pack.
    main = threading.main_thread().ident or 0
    frame = _users_frame(sys._getframe()) or _users_frame(_frames().get(main))
    if frame is None:
        warnings.warn(message, OffloadWarning, stacklevel=2)
        return
    place = frame.f_globals
    registry = place.setdefault("__warningregistry__", {})  # once per line, as `warnings.warn` does
    file, line = frame.f_code.co_filename, frame.f_lineno
    warnings.warn_explicit(message, OffloadWarning, file, line, place.get("__name__"), registry)


def speaks() -> bool:
    """Whether this process is the one of its ranks that logs what concerns them all."""
    return os.environ.get("RANK", "0") == "0"


class Notices:
    """Messages given once each, by key. Takes no lock: two threads at the same moment may both give one."""

    def __init__(self) -> None:
        self.said: set[str] = set()

    def say(self, key: str, text: str, *, level: int | None = None) -> None:
        """Warn the first time; with a `level`, log it at that instead, so that `python -W error` continues."""
        if key not in self.said:
            self.said.add(key)  # first, as the warning may be raised
            if level is None:
                warn(text)
            else:
                logging.getLogger("tba").log(level, text)


def _frames() -> dict[int, FrameType]:
    """Each thread's current frame.

    CPython 3.11.7 and others may collect garbage meanwhile, under a lock that the end of a `threading.local` waits for:
    the whole process then deadlocks (python/cpython#106883).
    """
    collects = gc.isenabled()
    if collects:
        gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()


def _users_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None and between(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def users_part(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the user's first frame on; None if it has no such frame."""
    while trace is not None and between(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace
