"""Direct: device memory lent to a store that moves it itself (GPUDirect Storage), with no copy in host memory.

The order kept here, in place of `streams.out` and `into`:

1. Out: the worker waits for an event recorded on the producer's stream behind the kernel that fills the memory, then
   transfers. The memory is referenced until the transfer has ended.
2. In: the memory is allocated on the consumer's stream, and may be a block that kernels queued there still use; the
   worker waits for those, then transfers. When the ticket has ended the bytes are there for every stream.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from io_backends import Buffer

from . import streams


class Reached:
    """Called, on any thread, it waits until a stream has run what had been queued on it."""

    __slots__ = ("_device", "_event")

    def __init__(self, stream: Any) -> None:
        self._device = stream.device
        self._event = torch.cuda.Event(blocking=True)  # the worker that waits sleeps instead of keeping a core busy
        self._event.record(stream)

    def __call__(self) -> None:
        with torch.cuda.device(self._device):  # a new thread's device is the first one
            self._event.synchronize()


class Present:
    """What `streams.use` takes for bytes that are there already: they were allocated on the stream `consumer`."""

    __slots__ = ("_consumer",)

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer

    def wait(self, tensor: Tensor) -> None:
        current = torch.cuda.current_stream(tensor.device)
        if current != self._consumer:
            tensor.record_stream(current)


def lend(source: Tensor, begin: int, nbytes: int, producer: Any) -> tuple[Buffer, Reached]:
    """Bytes `[begin, begin + nbytes)` of the storage of `source`, and what to call before touching them."""
    raw = streams.raw_bytes(source, begin, nbytes)
    streams.goes_early(raw, producer)
    return Buffer(raw.data_ptr(), nbytes, raw), Reached(producer)


def borrow(nbytes: int, device: torch.device) -> tuple[Tensor, Present, Buffer, Reached]:
    """Memory of `device` to transfer into: its bytes (uint8 [nbytes]), what `streams.use` takes for them once they are
    there, the buffer, and what to call before."""
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    consumer = torch.cuda.current_stream(device)
    return target, Present(consumer), Buffer(target.data_ptr(), nbytes, target), Reached(consumer)
