"""Streams: a tensor's bytes from its device to host memory and back, ordered against the streams that use them.

The hazard. A copy on a side stream, or a worker's transfer, runs concurrently with the compute streams. Without order
it reads a tensor before its kernel has written it, or fills memory that an earlier kernel still reads. And the caching
allocator, which only knows the stream that a block was allocated on, may reuse the block during the copy.

Out, by a copy (`out`), where P is the producer's stream and S the side stream:

1. The hook records an event on P, behind the kernel that it has just launched, and S waits for it. Otherwise S would
   copy what the kernel has not written yet.
2. S copies to host memory and records a second event. The hook returns; P goes on.
3. `Departure` keeps referencing the source. If it were freed here, P could reuse its block while S still reads it.
4. Someone asks the `Departure` whether S has passed the second event (`over`); then it drops the source. If nobody asks
   any more, the allocator is told about S (`record_stream`). Not earlier, because such a block is not reused before
   everything queued on S at its release has run: a program that launches ahead of the device would soon hold a step's
   worth of them.

In, by a copy (`into`), where C is the consumer's stream:

1. The target is allocated on C, so kernels queued on C may still read its block; S waits for C.
2. S copies from host memory and records an event.
3. At each use, the stream that is current then waits for the event (`use`); if it is not C, the allocator is told about
   it. From the first use on, whatever frees the block does so behind the copy. If nobody uses a target, it is freed
   after S is told, as above.

Host memory is retained until the copy from or to it is over, whoever has dropped it before.

A store that moves device memory itself (GPUDirect Storage: `lend`, `borrow`) needs no copy and no S. A write begins
after an event on P behind the kernel. For a read, a worker waits for an event on C behind what still uses the block.
The store holds the memory until the transfer has ended; then the bytes are there for every stream.

On a CPU nothing is asynchronous: `out` returns the tensor's own memory, `into` the host's tensor, and neither waits. So
the rest of the engine has a single path.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from io_backends import Buffer, BufferPool

from .kinds import active, function, has_streams, is_streamed, module_of

_streams: dict[tuple[torch.device, str], Any] = {}  # per device and direction, for the whole process
_of_thread = threading.local()  # `streams`: this thread's own objects for them


def producer_stream(tensor: Tensor) -> Any:
    """Return the stream of the operator that is saving `tensor`; None on a CPU."""
    # By number: `torch.cuda.current_stream` with a device takes ten times as long.
    if tensor.is_cpu or not is_streamed(tensor):
        return None
    return torch.accelerator.current_stream(tensor.get_device())


def current(device: torch.device) -> Any:
    """The stream on which kernels launched now would run; None on a CPU."""
    return torch.accelerator.current_stream(device.index) if has_streams(device.type) else None


@contextmanager
def on(producer: Any) -> Iterator[None]:
    """Run a region on the stream that made a tensor, queued behind its kernel, and outside inference mode.

    Memory freed in the region is reusable behind the region's own kernels. On a side stream the original would stay
    until the device has processed it there, so a program that launches ahead of the device would hold a step's worth of
    originals, which compression must avoid. Inference-mode tensors have no version.
    """
    with torch.inference_mode(False), nullcontext() if producer is None else producer:
        yield


def also_used(tensor: Tensor, producer: Any) -> None:
    """Tell the allocator if `tensor` is used on another stream than `producer` too: the current one."""
    current = producer_stream(tensor)
    if current != producer:
        as_bytes(tensor).record_stream(current)


def also_read(tensor: Tensor, producer: Any) -> None:
    """Make the current stream wait for what `producer` has queued, to read a tensor that was made on that."""
    reader = producer_stream(tensor)
    if reader != producer:
        reader.wait_stream(producer)
    also_used(tensor, producer)


def goes_early(tensor: Tensor, producer: Any) -> None:
    """Tell the allocator that kernels on `producer` may still read memory that is freed before the graph is.

    Costs nothing if the memory was allocated on that stream.
    """
    if not is_streamed(tensor):
        return
    backend = function(tensor.device.type, "get_allocator_backend")
    if backend is None or backend() == "native":  # others raise if it is the stream of the allocation
        as_bytes(tensor).record_stream(producer)


def be_on(device: torch.device) -> None:
    """Make this thread use a device from now on. A new thread starts on the first, where it would make a context."""
    if has_streams(device.type):
        module_of(device.type).set_device(device)


def capturing(tensor: Tensor) -> bool:
    """Whether the device is capturing a graph, during which the host may neither wait for events nor copy."""
    if tensor.is_cpu:
        return False
    asks = function(tensor.device.type, "is_current_stream_capturing")
    return asks is not None and bool(asks())


def capturing_here() -> bool:
    """Whether this thread is capturing a device's graph: it may neither query an event nor unpin host memory."""
    found = active()
    asks = None if found is None else function(found[0], "is_current_stream_capturing")
    return asks is not None and bool(asks())


class Departure:
    """What `stream` does until `event`: a copy out of `source`, or (None) kernels that use memory a store will move.

    `over` asks whether it is done; a call waits until it is, on any thread.
    """

    __slots__ = ("_begun", "_event", "_source", "_stream")

    def __init__(self, source: Tensor | None, stream: Any, event: Any, begun: Any = None) -> None:
        self._source = source
        self._stream = stream
        self._event = event
        self._begun = begun

    def over(self) -> bool:
        if not self._event.query():
            return False
        self._source = None
        return True

    def seconds(self) -> float:
        """How long it took the device, once over; 0 if it was not timed."""
        return self._begun.elapsed_time(self._event) * 1e-3 if self._begun is not None else 0.0

    def __call__(self) -> None:
        # Waiting makes a context on the current device, which for a new thread is the first one.
        with module_of(self._stream.device.type).device(self._stream.device):
            self._event.synchronize()
        self._source = None

    def __del__(self) -> None:
        if self._source is not None:  # nobody asked: the write was cancelled
            self._source.record_stream(self._stream)


class Arrival:
    """Device memory that was allocated on `consumer`, and the copy on `side` that fills it (None if a store does)."""

    __slots__ = ("_begun", "_consumer", "_copied", "_side", "_target")

    def __init__(
        self, target: Tensor | None, consumer: Any, side: Any = None, copied: Any = None, begun: Any = None
    ) -> None:
        self._target = target
        self._consumer = consumer
        self._side = side
        self._copied = copied
        self._begun = begun

    @property
    def timed(self) -> bool:
        """Whether `seconds` has an answer."""
        return self._begun is not None

    def seconds(self) -> float:
        """How long the copy took the device; 0 while it is running."""
        return self._begun.elapsed_time(self._copied) * 1e-3 if self._copied.query() else 0.0

    def wait(self, tensor: Tensor) -> None:
        """Make the current stream wait for the copy before it uses `tensor`, a view of what was copied."""
        current = torch.accelerator.current_stream(tensor.get_device())
        if self._copied is not None:
            current.wait_event(self._copied)
        if current != self._consumer:
            as_bytes(tensor).record_stream(current)
        self._target = None  # from here on the block is freed behind the copy

    def __del__(self) -> None:
        if self._target is not None:  # unused
            self._target.record_stream(self._side)


def out(
    source: Tensor, begin: int, nbytes: int, producer: Any, memory: BufferPool | None, *, timed: bool = False
) -> tuple[Buffer, Departure | None]:
    """Start moving bytes `[begin, begin + nbytes)` of the storage of `source` to host memory.

    A device's bytes go to `memory`, and `timed` measures how long that takes; a CPU's stay where they are. Returns the
    host bytes and what tells when they may be used (None: now). Raises StoreFull if `memory` has no room.
    """
    storage = source.untyped_storage()
    if producer is None:
        return Buffer(storage.data_ptr() + begin, nbytes, source), None
    device = source.device
    assert memory is not None
    view, buffer = memory.lease(nbytes)  # first: it may be asked for again and again
    side = _side_stream(device, "out")
    launched = torch.Event(device)
    launched.record(producer)
    side.wait_event(launched)
    host = host_bytes(view)
    raw = raw_bytes(source, begin, nbytes)
    goes_early(raw, producer)
    begun = torch.Event(device, enable_timing=True) if timed else None
    copied = torch.Event(device, enable_timing=timed)
    departure = Departure(raw, side, copied, begun)
    with side:
        if begun is not None:
            begun.record(side)
        host.copy_(raw, non_blocking=True)
        copied.record(side)
    memory.retain(host, copied.query, side)
    return buffer._replace(owner=host, given=True), departure


class Target(NamedTuple):
    """Device memory for bytes to come: a copy into it waits for what `consumer` had queued by then, and no more."""

    memory: Tensor
    consumer: Any
    allocated: Any  # event


def target(nbytes: int, device: torch.device) -> Target:
    """Allocate memory of `device` on the current stream, for `into`."""
    consumer = torch.accelerator.current_stream(device.index)
    memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
    allocated = torch.Event(device)
    allocated.record(consumer)
    return Target(memory, consumer, allocated)


def into(
    host: Tensor,
    device: torch.device,
    memory: BufferPool | None,
    *,
    taken: Target | None = None,
    timed: bool = False,
) -> tuple[Tensor, Arrival | None]:
    """Start moving host bytes, which lie in `memory`, to `device`. Returns the tensor over them and what `use` takes.

    `memory` is None for a CPU, whose bytes are there already, as are those that a store has put into device memory.
    `taken` is where they go, if that has been allocated; `timed` measures how long the copy takes.
    """
    if memory is None or not host.is_cpu:
        return host, None
    bytes_to, consumer, allocated = taken or target(host.numel(), device)
    side = _side_stream(device, "in")
    side.wait_event(allocated)
    begun = torch.Event(device, enable_timing=True) if timed else None
    copied = torch.Event(device, enable_timing=timed)
    arrival = Arrival(bytes_to, consumer, side, copied, begun)
    with side:
        if begun is not None:
            begun.record(side)
        bytes_to.copy_(host, non_blocking=True)
        copied.record(side)
    memory.retain(host, copied.query, side)
    return bytes_to, arrival


def lend(source: Tensor, begin: int, nbytes: int, producer: Any) -> tuple[Buffer, Departure]:
    """Lend a store bytes `[begin, begin + nbytes)` of the storage of `source`; also return what tells when to begin."""
    raw = raw_bytes(source, begin, nbytes)
    goes_early(raw, producer)
    return Buffer(raw.data_ptr(), nbytes, raw), _after(producer)


def borrow(nbytes: int, device: torch.device) -> tuple[Tensor, Arrival, Buffer, Departure]:
    """Allocate memory of `device` for a store to read into.

    Returns its bytes (uint8 [nbytes]), what `use` takes for them, the buffer, and the wait to call before the read.
    """
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    consumer = torch.accelerator.current_stream(device.index)
    return target, Arrival(None, consumer), Buffer(target.data_ptr(), nbytes, target), _after(consumer)


def _after(stream: Any) -> Departure:
    """Make a wait for everything queued on a stream so far."""
    event = torch.Event(stream.device)
    event.record(stream)
    return Departure(None, stream, event)


def use(tensor: Tensor, ready: Any) -> None:
    """Make the current stream wait until the bytes of `tensor` are there. `ready` is from `into` or `borrow`."""
    if ready is not None:
        ready.wait(tensor)


def fetch(flag: Tensor) -> tuple[Tensor, Any]:
    """Start copying a small tensor of a device to host memory. Returns the copy and the event that completes it."""
    host = torch.empty_like(flag, device="cpu", pin_memory=True)
    host.copy_(flag, non_blocking=True)
    there = torch.Event(flag.device)
    there.record(torch.accelerator.current_stream(flag.get_device()))
    return host, there


def stamp(stream: Any) -> Any:
    """Have a device note when it comes here on a stream. `elapsed_time` tells the milliseconds to a later one."""
    event = torch.Event(stream.device, enable_timing=True)
    event.record(stream)
    return event


def as_bytes(tensor: Tensor) -> Tensor:
    """Return what `record_stream` may be called on: of a conjugated or negated tensor, its bytes.

    PyTorch would tell the allocator of a copy of such a tensor, and write beyond its own stack.
    """
    if tensor.is_conj() or tensor.is_neg():
        return raw_bytes(tensor, 0, tensor.untyped_storage().nbytes())
    return tensor


def raw_bytes(source: Tensor, begin: int, nbytes: int) -> Tensor:
    """Make a tensor over bytes `[begin, begin + nbytes)` of the storage of `source`, uint8 [nbytes]."""
    raw = torch.empty(0, dtype=torch.uint8, device=source.device)
    return raw.set_(source.untyped_storage(), begin, (nbytes,), (1,))


def host_bytes(leased: Any, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Make a tensor over leased host memory that keeps the lease while it lives; return a tensor unchanged.

    It is of `dtype` if whole elements fill the lease, else of bytes.
    """
    if isinstance(leased, Tensor):
        return leased
    return torch.frombuffer(leased, dtype=torch.uint8 if leased.nbytes % dtype.itemsize else dtype)


def active_device() -> torch.device:
    """The device that is current on this thread."""
    found = active()
    assert found is not None
    return torch.device(found[0], found[1].current_device())


def finish() -> None:
    """Wait for every copy in flight, so that host memory may go back to the system."""
    for stream in list(_streams.values()):
        stream.synchronize()


def _side_stream(device: torch.device, direction: str) -> Any:
    stream = _streams.get((device, direction))
    if stream is None:
        stream = _streams.setdefault((device, direction), torch.Stream(device))
    known: dict[int, tuple[Any, Any]] = vars(_of_thread).setdefault("streams", {})
    found = known.get(id(stream))
    if found is None or found[0] is not stream:
        # Entering a stream stores the previous one on its object, so each thread has its own object.
        numbers = {name: getattr(stream, name) for name in ("stream_id", "device_index", "device_type")}
        found = known[id(stream)] = stream, torch.Stream(**numbers)
    return found[1]
