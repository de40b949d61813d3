"""Shortage: tells a lack of memory from other errors, and says it in PyTorch's own words.

Programs that look for the largest batch that fits (accelerate's `find_executable_batch_size`, Lightning's) know a lack
of memory by the text of a RuntimeError with one argument, which must be PyTorch's.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator

import torch

# What ends a call that had no memory: torch's is a RuntimeError, the system's an OSError.
ENDS = (RuntimeError, MemoryError, OSError)
_HOST = "DefaultCPUAllocator: can't allocate memory"
_DEVICE = " out of memory."


def lacks_memory(error: BaseException) -> bool:
    """Whether memory was lacking, for an error or what has caused it."""
    return any(map(_is_lack, _causes(error)))


def in_torchs_words(error: BaseException, nbytes: int, about: str) -> RuntimeError:
    """Make the error to raise for a lack of memory: PyTorch's own if that has caused it, else one in its words.

    Args:
        error: was raised; `lacks_memory`.
        nbytes: were asked for.
        about: what for, in a note.
    """
    cause = next(filter(_is_lack, _causes(error)))
    text = str(cause.args[0]) if len(cause.args) == 1 else ""
    if isinstance(cause, RuntimeError) and (_HOST in text or _DEVICE in text):
        made = cause
    elif isinstance(cause, RuntimeError):  # of a device
        made = torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {nbytes} bytes ({cause})")
    else:
        made = RuntimeError(
            f"{_HOST}: you tried to allocate {nbytes} bytes. Error code {errno.ENOMEM} (Cannot allocate memory)"
        )
    if made is not cause:
        made.__cause__ = cause
    if about not in getattr(made, "__notes__", ()):
        made.add_note(about)
    return made


def _is_lack(error: BaseException) -> bool:
    if isinstance(error, RuntimeError):
        return isinstance(error, torch.OutOfMemoryError) or any(
            text in str(error) for text in (_HOST, "out of memory", "cannot allocate memory")
        )
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Go from what was really raised first to an error that was made of it."""
    if error is not None:
        yield from _causes(error.__cause__)
        yield error
