"""Simulation: a CUDA device as far as stream order goes, which runs what is queued in any order that order allows.

What is real of it: streams are queues; an event is a place in one; a stream that waits for it stands still until that
place is passed; of the streams that can go on, chance picks one. The allocator hands a freed block to the next who
asks on the same stream, at once, except that it waits for the streams `record_stream` has named. Memory that has not
been written yet, or is reused too early, therefore shows as wrong bytes, for some seed.

`SimulatedTorch` stands in for the module `torch` where code asks it for streams, events and device memory; host
tensors are real.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

PAGE_BYTES = 4096


class Stream:
    """A queue of work: (what for the log, whether it can run now, what it does)."""

    def __init__(self, gpu: SimulatedCuda, device: torch.device, name: str) -> None:
        self._gpu = gpu
        self.device = device
        self.name = name
        self.queue: deque[tuple[str, Callable[[], bool], Callable[[], None]]] = deque()
        self.stream_id, self.device_index, self.device_type = len(gpu.streams), device.index, 1

    def enqueue(self, what: str, work: Callable[[], None], ready: Callable[[], bool] = lambda: True) -> None:
        with self._gpu.lock:
            self._gpu.log.append(f"{self.name}: {what}")
            self.queue.append((what, ready, work))

    def __enter__(self) -> Stream:
        here = self._gpu.here
        here.left.append((here.device, self._gpu.current_stream(self.device)))
        here.device, here.streams[self.device] = self.device, self
        return self

    def __exit__(self, *_: object) -> None:
        here = self._gpu.here
        here.device, here.streams[self.device] = here.left.pop()

    def wait_event(self, event: Event) -> None:
        place = event.place
        self.enqueue(f"wait {place.name}", lambda: None, lambda: place.passed)

    def wait_stream(self, other: Stream) -> None:
        event = Event(self._gpu)
        event.record(other)
        self.wait_event(event)


class Place:
    """Where in a stream an event was recorded."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.passed = False


class Event:
    """As `torch.cuda.Event`: waiting for one that was never recorded is no waiting."""

    def __init__(self, gpu: SimulatedCuda) -> None:
        self._gpu = gpu
        self.place = Place("nothing")
        self.place.passed = True

    def record(self, stream: Stream) -> None:
        place = self.place = Place(f"event of {stream.name}")
        stream.enqueue("record", lambda: setattr(place, "passed", True))

    def query(self) -> bool:
        return self.place.passed

    def synchronize(self) -> None:
        self._gpu.log.append(f"host: wait {self.place.name} on {self._gpu.here.device}")
        self._gpu.run(until=lambda: self.place.passed)
        assert self.place.passed


class Block:
    """Memory of the device, and who has used it on which stream."""

    def __init__(self, nbytes: int, stream: Stream) -> None:
        self.bytes = torch.full((nbytes,), 0xEE, dtype=torch.uint8)
        self.stream = stream
        self.other_streams: set[Stream] = set()


class Storage:
    """Owns a block: the block is free when this dies."""

    def __init__(self, gpu: SimulatedCuda, block: Block) -> None:
        self._gpu = gpu
        self.block = block

    def __del__(self) -> None:
        self._gpu.free(self.block)


def _unowned(host: torch.Tensor) -> torch.Tensor:
    """The same bytes, whose life this does not prolong: a queued copy on a real device does not either."""
    memory = (ctypes.c_ubyte * host.numel()).from_address(host.data_ptr())
    return torch.frombuffer(memory, dtype=torch.uint8)


class DeviceTensor:
    """Bytes on the device. Copies between it and host tensors are queued on the current stream."""

    is_cuda, is_cpu = True, False

    def __init__(self, gpu: SimulatedCuda, device: torch.device, storage: Storage | None) -> None:
        self._gpu = gpu
        self.device = device
        self._storage = storage
        self._begin, self._nbytes = 0, 0 if storage is None else storage.block.bytes.numel()

    def numel(self) -> int:
        return self._nbytes

    def get_device(self) -> int:
        return int(self.device.index)

    def untyped_storage(self) -> Storage:
        assert self._storage is not None
        return self._storage

    def set_(self, storage: Storage, begin: int, size: tuple[int], stride: tuple[int]) -> DeviceTensor:
        assert stride == (1,)
        self._storage, self._begin, self._nbytes = storage, begin, size[0]
        return self

    @property
    def bytes(self) -> torch.Tensor:
        return self.untyped_storage().block.bytes[self._begin : self._begin + self._nbytes]

    def record_stream(self, stream: Stream) -> None:
        block = self.untyped_storage().block
        if stream is not block.stream:
            self._gpu.log.append(f"allocator: told of {stream.name}")
            block.other_streams.add(stream)

    def copy_(self, host: torch.Tensor, non_blocking: bool = False) -> DeviceTensor:
        assert non_blocking
        there = self.bytes  # the memory, not this tensor: a queued copy keeps nothing alive on a real device
        unowned = _unowned(host)
        self._gpu.current_stream(self.device).enqueue("copy in", lambda: there.copy_(unowned))
        return self

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function is torch.Tensor.copy_
        host, device_tensor = args
        assert kwargs == {"non_blocking": True}
        there, gpu = device_tensor.bytes, device_tensor._gpu
        unowned = _unowned(host)
        gpu.current_stream(device_tensor.device).enqueue("copy out", lambda: unowned.copy_(there))
        return host


class _Here(threading.local):
    """What is current on this thread."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        self.streams: dict[torch.device, Stream] = {}
        self.left: list[tuple[torch.device, Stream]] = []  # by the streams entered


class SimulatedCuda:
    """Stands in for `torch.cuda`. `log` has what was queued and asked for, in order, each line "stream: what"."""

    def __init__(self, seed: int) -> None:
        self.lock = threading.RLock()
        self.log: list[str] = []
        self.here = _Here()
        self.streams: list[Stream] = []
        self._defaults: dict[torch.device, Stream] = {}
        self._chance = random.Random(seed)
        self._free: list[Block] = []
        self._not_yet_free: list[tuple[Block, list[Place]]] = []

    # -- what torch.cuda has -------------------------------------------------------------------------------------

    def current_stream(self, device: torch.device | None = None) -> Stream:
        device = self.here.device if device is None else device
        if device not in self._defaults:
            self._defaults[device] = self.make_stream(f"default {device.index}", device)
        return self.here.streams.get(device, self._defaults[device])

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream(stream.device)
        with self.device(stream.device):
            self.here.streams[stream.device] = stream
            try:
                yield
            finally:
                self.here.streams[stream.device] = before

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.here.device = self.here.device, device
        try:
            yield
        finally:
            self.here.device = before

    def get_allocator_backend(self) -> str:
        return "native"

    # -- what a test does with it --------------------------------------------------------------------------------

    def make_stream(self, name: str, device: torch.device) -> Stream:
        self.streams.append(Stream(self, device, name))
        return self.streams[-1]

    def empty(self, nbytes: int, device: torch.device) -> DeviceTensor:
        stream = self.current_stream(device)
        with self.lock:
            self._collect()
            for block in self._free:
                if block.stream is stream and block.bytes.numel() == nbytes:
                    self._free.remove(block)
                    break
            else:
                block = Block(nbytes, stream)
        return DeviceTensor(self, device, Storage(self, block))

    def free(self, block: Block) -> None:
        with self.lock:
            places = []
            for stream in block.other_streams:
                event = Event(self)
                event.record(stream)
                places.append(event.place)
            block.other_streams.clear()
            self._not_yet_free.append((block, places))
            self._collect()

    def _collect(self) -> None:
        waiting = []
        for block, places in self._not_yet_free:
            if all(place.passed for place in places):
                self._free.append(block)
            else:
                waiting.append((block, places))
        self._not_yet_free = waiting

    def run(self, *, until: Callable[[], bool] = lambda: False, steps: int | None = None) -> None:
        """Do queued work until `until()`, for at most so many steps, or until there is none."""
        while (steps is None or steps > 0) and not until():
            with self.lock:
                able = [stream for stream in self.streams if stream.queue and stream.queue[0][1]()]
                if not able:
                    assert not any(stream.queue for stream in self.streams), "streams wait for one another"
                    return
                work = self._chance.choice(able).queue.popleft()[2]
                work()
            if steps is not None:
                steps -= 1


class SimulatedTorch:
    """Stands in for the module `torch`."""

    def __init__(self, gpu: SimulatedCuda) -> None:
        self.cuda = gpu
        self.accelerator = self
        self.fills = False  # as under use_deterministic_algorithms: a kernel fills what `empty` gives

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def Event(self, device: torch.device, *, enable_timing: bool = False) -> Event:
        return Event(self.cuda)

    def Stream(self, device: torch.device | None = None, *, stream_id: int = 0, **_: int) -> Stream:
        """A new one on a device, or the one of a number."""
        if device is None:
            return self.cuda.streams[stream_id]
        return self.cuda.make_stream(f"stream {len(self.cuda.streams)}", device)

    def current_stream(self, index: int) -> Stream:
        """As `torch.accelerator.current_stream`."""
        return self.cuda.current_stream(torch.device("cuda", index))

    def empty(self, nbytes: int, *, dtype: torch.dtype, device: torch.device) -> DeviceTensor:
        assert dtype is torch.uint8
        assert device.type == "cuda"
        tensor = self.cuda.empty(nbytes, device) if nbytes else DeviceTensor(self.cuda, device, None)
        if nbytes and self.fills:
            there = tensor.bytes
            self.cuda.current_stream(device).enqueue("fill", lambda: there.fill_(255))
        return tensor
