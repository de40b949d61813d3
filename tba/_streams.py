"""Handoff: a tensor's bytes from its device to host memory and back, ordered against the streams that use it.

The hazard. A copy on a side stream runs beside the compute streams. Without order it reads a tensor before its kernel
has written it, or fills memory that an earlier kernel still reads; and the caching allocator, which knows only the
stream a block was allocated on, may hand out the block while the copy is under way.

The order kept here:

1. Out: the side stream waits for an event recorded on the producer's stream after the kernel was launched. The source
   stays referenced until `arrived` (called on a worker) has waited for the copy's own event.
2. In: the destination is allocated on the consumer's stream; the side stream waits for what that stream has queued
   (the block may be a recycled one) and is recorded with the allocator; the consumer's stream waits for the copy's
   event at each use. The current stream is asked for at each use, per device, never remembered.

On a CPU nothing is asynchronous: `out` gives the tensor's own memory, `into` its own storage, and neither waits. The
rest of the engine therefore runs one path.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from io_backends import Buffer, BufferPool

from ._errors import OffloadWarning

_PIN_ALIGNMENT = 4096
_streams: dict[tuple[torch.device, str], Any] = {}  # per device and direction, for the whole process
_pinning_failed = False


def producer_stream(tensor: Tensor) -> Any:
    """The stream that the operator saving `tensor` runs on; None on a CPU."""
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None


def capturing(tensor: Tensor) -> bool:
    """Whether the device is recording a CUDA graph, in which no event may be waited for and no file touched."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def out(source: Tensor, begin: int, nbytes: int, producer: Any) -> tuple[Buffer, Callable[[], None] | None]:
    """Start moving bytes `[begin, begin + nbytes)` of the storage of `source` to host memory.

    Returns the host bytes and what to call, on any thread, before touching them (None: they are there).
    """
    storage = source.untyped_storage()
    if producer is None:
        return Buffer(storage.data_ptr() + begin, nbytes, source), None
    device = source.device
    side = _side_stream(device, "out")
    launched = torch.cuda.Event()
    launched.record(producer)
    side.wait_event(launched)
    host = pinned(nbytes)
    arrived = torch.cuda.Event()
    raw = torch.empty(0, dtype=torch.uint8, device=device)
    raw.set_(storage, begin, (nbytes,), (1,))
    with torch.cuda.stream(side):
        host.copy_(raw, non_blocking=True)
        arrived.record(side)
    return Buffer(host.data_ptr(), nbytes, host), arrived.synchronize


def into(host: Tensor, device: torch.device) -> tuple[torch.UntypedStorage, Any]:
    """Start moving host bytes to `device`: the storage to build on, and what `use` waits for."""
    if device.type == "cpu":
        return host.untyped_storage(), None
    consumer = torch.cuda.current_stream(device)
    side = _side_stream(device, "in")
    target = torch.empty(host.numel(), dtype=torch.uint8, device=device)
    side.wait_stream(consumer)
    copied = torch.cuda.Event()
    with torch.cuda.stream(side):
        target.copy_(host, non_blocking=True)
        copied.record(side)
    target.record_stream(side)
    return target.untyped_storage(), (copied, consumer)


def use(tensor: Tensor, ready: Any) -> None:
    """Make the current stream wait until the bytes beneath `tensor` have arrived."""
    if ready is None:
        return
    copied, consumer = ready
    current = torch.cuda.current_stream(tensor.device)
    current.wait_event(copied)
    if current != consumer:
        tensor.record_stream(current)


def lease(pool: BufferPool, nbytes: int, skew: int, device: torch.device) -> tuple[Any, Buffer]:
    """Host memory to read into for a tensor of `device`: (what keeps it and `host_bytes` takes, the buffer)."""
    if device.type == "cpu":
        return pool.lease(nbytes, skew)
    whole = pinned(nbytes + 2 * _PIN_ALIGNMENT)  # whole blocks around the bytes, so that a direct read may fill them
    start = _PIN_ALIGNMENT + (skew - whole.data_ptr()) % _PIN_ALIGNMENT
    host = whole[start : start + nbytes]
    return host, Buffer(host.data_ptr(), nbytes, host, padded=True)


def host_bytes(leased: Any) -> Tensor:
    """The tensor over what `lease` gave."""
    return leased if isinstance(leased, Tensor) else torch.frombuffer(leased, dtype=torch.uint8)


def pinned(nbytes: int) -> Tensor:
    """Host memory that a device copies to at full speed; pageable, with one warning, where pinning fails."""
    global _pinning_failed
    if not _pinning_failed:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            _pinning_failed = True
            warnings.warn(
                f"pinning {nbytes} bytes of host memory failed ({error}); copies go through pageable memory, slower. "
                "Raise the locked-memory limit (ulimit -l), or on WSL2 its memory.",
                OffloadWarning,
                stacklevel=2,
            )
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def _side_stream(device: torch.device, direction: str) -> Any:
    stream = _streams.get((device, direction))
    if stream is None:
        stream = _streams[device, direction] = torch.cuda.Stream(device)
    return stream
