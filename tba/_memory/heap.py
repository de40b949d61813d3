"""Heap: the freed memory that glibc keeps, and the one line of advice that tells a user about it.

On a CPU, with the default allocator, freed blocks stay in glibc's heap between live ones: the process remains nearly as
large as without offloading, and nothing else shows why. glibc's own count says how much that is (measured, 24 layers of
256 on 2 cores: 250 to 520 MiB of the 750 that a step writes; 60 with its thresholds tuned). Under another allocator
glibc's heap is all but empty, so nothing is said.

The line is advice, not a failure, so it is logged (logger "tba") rather than warned: `python -W error` goes on.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence

from .._device.kinds import active
from .._text import size

_LOOKS = 3  # the first step's gaps are filled by the optimizer's state; later ones show what stays
_LEAST_BYTES = 64 << 20
_LEAST_SHARE = 0.25


def advice(retained_bytes: int, written_bytes: int, command: Sequence[str]) -> str:
    """Compose the line: the bytes found and what to type; "" where the heap keeps too little of what a step wrote."""
    if retained_bytes <= max(_LEAST_BYTES, _LEAST_SHARE * written_bytes):
        return ""
    return (
        f"glibc's heap keeps {size(retained_bytes)} of freed memory at the end of a step that wrote "
        f"{size(written_bytes)}: the process does not shrink by that. An allocator that reuses what is freed avoids "
        f"it: {shlex.join(('tba', 'run', '--', *command))}"
    )


class Heap:
    """Check of the heap after the first steps of the process that write something. Logs at most once."""

    def __init__(self, retained_bytes: Callable[[], int], environ: Mapping[str, str] = os.environ) -> None:
        self._retained_bytes = retained_bytes
        # One rank of a node speaks for all.
        self._looks_left = _LOOKS if environ.get("LOCAL_RANK", "0") == "0" else 0

    def end_step(self, written_bytes: int) -> None:
        """Check the heap after a step that wrote `written_bytes`."""
        if not self._looks_left or not written_bytes or active() is not None:
            return
        self._looks_left -= 1
        if line := advice(self._retained_bytes(), written_bytes, sys.orig_argv):
            self._looks_left = 0
            logging.getLogger("tba").warning(line)


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of malloc.h."""

    _before = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks")
    _fields_ = [(name, ctypes.c_size_t) for name in (*_before, "fordblks", "keepcost")]


def _find_retained_bytes() -> Callable[[], int]:
    """Find the function that counts free bytes in glibc's heap. A call takes 0.1 ms, 15 where it is fragmented."""
    count = getattr(ctypes.CDLL(None), "mallinfo2", None)  # from glibc 2.33 on
    if count is None:
        return lambda: 0
    count.restype = _MallInfo
    return lambda: int(count().fordblks)


heap = Heap(_find_retained_bytes())
