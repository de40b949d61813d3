"""Frames: where the user's own code ends and ours begins, for warnings and tracebacks that point at his line."""

from __future__ import annotations

import contextlib
import importlib
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


# A forward that `attach` follows reaches us through torch, a generator of ours through contextlib.
_BETWEEN = (
    _directory(os.path.dirname(__file__)),  # this package's
    *(_directory(file) for file in map(str, (compact.__file__, io_backends.__file__, torch.__file__))),
    *(_directory(importlib.__file__), contextlib.__file__, threading.__file__, "<frozen importlib"),
)


def between(file: str) -> bool:
    """Whether code of this file stands between the user's and the place that has something to say."""
    return file.startswith(_BETWEEN)


def warn(message: str) -> None:
    """Give an OffloadWarning that points at the user's line: of the `with`, the call or the forward that led here.

    On a worker's thread no call of his led here: the main thread's line then, where the program is now.
    """
    # No name here may stay bound to a frame of ours: it would hold itself, and through its callers what they pack.
    main = threading.main_thread().ident or 0
    frame = _users_frame(sys._getframe()) or _users_frame(sys._current_frames().get(main))
    if frame is None:
        warnings.warn(message, OffloadWarning, stacklevel=2)
        return
    place = frame.f_globals
    registry = place.setdefault("__warningregistry__", {})  # says each once a line, as `warnings.warn` does
    file, line = frame.f_code.co_filename, frame.f_lineno
    warnings.warn_explicit(message, OffloadWarning, file, line, place.get("__name__"), registry)


def _users_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame that is the user's; None where none is."""
    while frame is not None and between(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def users_part(trace: TracebackType | None) -> TracebackType | None:
    """A traceback from the user's first frame on; None where none is his."""
    while trace is not None and between(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace
