"""Bare I/O: a process that moves bytes between aligned memory and a nameless file, one system call after another.

It shares neither an interpreter nor an address space with the training it runs beside: what it costs that is the disk's
part of offloading, which no engine can do without. Its questions:
    {"directory": ..., "block": 4194304, "memory_bytes": 67108864, "huge": true}   once, first
    {"write": 788529152}, {"read": 788529152}                                      answered once all is moved
Answers are CPU seconds, user and system.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from typing import Any

from .serve import Tell, serve

_HUGE_PAGE_BYTES = 2 << 20
_NO_HUGE_PAGES = 15  # madvise(2): MADV_NOHUGEPAGE, which Python's mmap does not name


class BareIo:
    """Answers the questions."""

    def answer(self, question: dict[str, Any], tell: Tell) -> float:
        """Answer one question."""
        begun_s = time.process_time()
        if "directory" in question:
            self._open(**question)
        for kind in ("write", "read"):
            if kind in question:
                self._move(question[kind], write=kind == "write")
        return time.process_time() - begun_s

    def _open(self, directory: str, block: int, memory_bytes: int, huge: bool) -> None:
        self._fd, self._block = os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_DIRECT, 0o600), block
        memory = mmap.mmap(-1, memory_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        memory.madvise(mmap.MADV_HUGEPAGE if huge else _NO_HUGE_PAGES)
        ctypes.memset(address, 1, len(memory))  # touched here, not in a step
        begin = -address % _HUGE_PAGE_BYTES
        self._memory = memoryview(memory)[begin : begin + memory_bytes]

    def _move(self, nbytes: int, *, write: bool) -> None:
        """Move so much from the file's beginning on; the memory is used in turn."""
        for offset in range(0, nbytes, self._block):
            at = offset % len(self._memory)
            piece = self._memory[at : at + min(self._block, nbytes - offset)]
            moved = os.pwrite(self._fd, piece, offset) if write else os.preadv(self._fd, [piece], offset)
            if moved != len(piece):
                raise OSError(f"{moved} of {len(piece)} bytes moved")


if __name__ == "__main__":
    serve(BareIo().answer)
