"""The device module, `torch.sim`: the names that a library uses of `torch.cuda`, for the accelerator made of a CPU.

Beside them, for tests: `held` (a stream that stands still), `carried` (what crossed
the links), `launches` (kernels queued and run at once), `host_register` and `host_unregister`.
"""

from __future__ import annotations

import atexit
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

_extension: ModuleType | None = None
default_generators: tuple[torch.Generator, ...] = ()
_numbers_of_graphs: Iterator[int] = iter(())
_initialized = True  # torch.utils.checkpoint keeps the generators' states only then

_Device = torch.device | str | int | None


def open_with(extension: ModuleType) -> None:
    """Start the device. Called once, by `load`."""
    global _extension, _numbers_of_graphs, default_generators
    _extension = extension
    extension.start_device()
    atexit.register(extension.halt)
    _numbers_of_graphs = count(extension.first_of_graphs)
    default_generators = tuple(extension.generator(index) for index in range(device_count()))


def extension() -> Any:
    """The extension's own names."""
    assert _extension is not None
    return _extension


# -- devices ---------------------------------------------------------------------------------------------------------


def _index(asked: _Device = None) -> int:
    if asked is None:
        return current_device()
    if isinstance(asked, int):
        return asked if asked >= 0 else current_device()
    found = torch.device(asked)
    if found.type != "sim":
        raise ValueError(f"Expected a sim device, but got: {found}")
    return current_device() if found.index is None else found.index


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    pass


_lazy_init = init


def _is_in_bad_fork() -> bool:
    return bool(extension().forked())


def device_count() -> int:
    return int(extension().devices)


def current_device() -> int:
    return int(extension().current_device())


def set_device(device: _Device) -> None:
    extension().exchange_device(_index(device))


def _exchange_device(index: int) -> int:
    return int(extension().exchange_device(index)) if index >= 0 else -1


_maybe_exchange_device = _exchange_device


class device:
    """Context: a device that is current, by itself or by its index."""

    def __init__(self, device: Any) -> None:
        self.idx = _index(device) if device is not None else -1
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = _exchange_device(self.idx)

    def __exit__(self, *_: object) -> None:
        _exchange_device(self.prev_idx)


class Properties(NamedTuple):
    """What is known of a device."""

    name: str
    total_memory: int
    multi_processor_count: int = 1


def get_device_properties(device: _Device = None) -> Properties:
    return Properties(get_device_name(device), int(extension().get_limit(_index(device))))


def get_device_name(device: _Device = None) -> str:
    return f"accelerator {_index(device)} made of a CPU"


# -- streams ---------------------------------------------------------------------------------------------------------


class Stream(torch.Stream):
    """As `torch.cuda.Stream`: one of the pool of a device, or, given its three numbers, a certain one."""

    def __new__(cls, device: _Device = None, priority: int = 0, **numbers: int) -> Stream:
        if numbers:
            made = super().__new__(cls, **numbers)
        else:
            made = super().__new__(cls, device=torch.device("sim", _index(device)), priority=priority)
        assert isinstance(made, Stream)
        return made

    def wait_event(self, event: torch.Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: torch.Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    @property
    def cuda_stream(self) -> int:
        return self.native_handle


class Event(torch.Event):
    """As `torch.cuda.Event`. Whoever waits for it sleeps, `blocking` or not."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        made = super().__new__(
            cls, device="sim", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
        )
        assert isinstance(made, Event)
        return made

    def elapsed_time(self, end_event: torch.Event) -> float:
        # PyTorch's own takes no subclass of its class.
        return float(extension().elapsed_ms(self.event_id, end_event.event_id))


class ExternalStream(Stream):
    """There are none."""

    def __new__(cls, *_: Any, **__: Any) -> ExternalStream:
        raise NotImplementedError("a sim device has no streams of others")


def _stream(index: int, number: int) -> Stream:
    kind = torch._C._autograd.DeviceType.PrivateUse1.value
    return Stream(stream_id=number, device_index=index, device_type=kind)


def current_stream(device: _Device = None) -> Stream:
    index = _index(device)
    return _stream(index, extension().current_stream(index))


def default_stream(device: _Device = None) -> Stream:
    return _stream(_index(device), 0)


def set_stream(stream: torch.Stream | None) -> None:
    if stream is not None:
        extension().use_stream(stream.device_index, stream.stream_id)


class StreamContext:
    """Context: a stream and its device are current, as `torch.cuda.StreamContext`."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream
        self._before: tuple[int, Stream, Stream] | None = None

    def __enter__(self) -> None:
        if self.stream is None:
            return
        # As CUDA's: what is current on both devices comes back at the end.
        here = current_device()
        self._before = here, current_stream(here), current_stream(self.stream.device_index)
        set_device(self.stream.device_index)
        set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            return
        here, on_ours, on_its_own = self._before
        set_stream(on_its_own)
        set_stream(on_ours)
        set_device(here)


def stream(stream: torch.Stream | None) -> StreamContext:
    return StreamContext(stream)


def synchronize(device: _Device = None) -> None:
    torch._C._accelerator_synchronizeDevice(_index(device))


def _sleep(cycles: int) -> None:
    """As `torch.cuda._sleep`: the current stream stands still for a moment, here of two billion cycles a second."""
    index = current_device()
    extension().sleep(index, extension().current_stream(index), cycles / 2e9)


def is_current_stream_capturing() -> bool:
    index = current_device()
    return bool(extension().captured(index, extension().current_stream(index)))


class Graph:
    """As `torch.cuda.CUDAGraph`: what was queued in a capture, to be queued again. Its memory stays its own."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._number: int | None = None
        self._work: Any = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        stream = current_stream()
        self._work = extension().begin_capture(stream.device_index, stream.stream_id)

    def capture_end(self) -> None:
        extension().end_capture()

    def replay(self) -> None:
        stream = current_stream()
        extension().replay(self._work, stream.device_index, stream.stream_id)

    def reset(self) -> None:
        self._work = None

    def stream(self) -> Stream:
        """The stream that this graph captures on, which nobody else has. There are 32, for all graphs ever made."""
        if self._number is None:
            self._number = next(_numbers_of_graphs)
            if self._number > extension().last_of_graphs:
                raise RuntimeError("sim: no stream left to capture on")
        return _stream(current_device(), self._number)

    def __len__(self) -> int:
        """How many pieces of work it holds."""
        return len(self._work)


CUDAGraph = Graph


@contextmanager
def graph(cuda_graph: Graph, pool: Any = None, stream: torch.Stream | None = None, **_: Any) -> Iterator[None]:
    """As `torch.cuda.graph`: captures into a graph what is queued in the region."""
    synchronize()
    stream = cuda_graph.stream() if stream is None else stream
    with StreamContext(stream):
        cuda_graph.capture_begin()
        try:
            yield
        finally:
            cuda_graph.capture_end()


def set_sync_debug_mode(debug_mode: int | str) -> None:
    """As `torch.cuda.set_sync_debug_mode`, but "warn" says nothing: operators that make the host wait raise."""
    extension().forbid_waits(debug_mode in (2, "error"))


@contextmanager
def held(*streams: torch.Stream) -> Iterator[None]:
    """Context: what is queued on these streams from here on runs only after its end."""
    numbers = [extension().hold(stream.device_index, stream.stream_id) for stream in streams]
    try:
        yield
    finally:
        for number in numbers:
            extension().release(number)


# -- memory ----------------------------------------------------------------------------------------------------------


def memory_stats_as_nested_dict(device: _Device = None) -> dict[str, Any]:
    found: dict[str, Any] = torch._C._accelerator_getDeviceStats(_index(device))
    return found


def memory_stats(device: _Device = None) -> OrderedDict[str, Any]:
    flat: list[tuple[str, Any]] = []

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                add(f"{prefix}.{key}" if prefix else key, inner)
        else:
            flat.append((prefix, value))

    add("", memory_stats_as_nested_dict(device))
    return OrderedDict(sorted(flat))


def _figure(kind: str, which: str, device: _Device) -> int:
    return int(memory_stats_as_nested_dict(device)[kind]["all"][which])


def memory_allocated(device: _Device = None) -> int:
    return _figure("allocated_bytes", "current", device)


def max_memory_allocated(device: _Device = None) -> int:
    return _figure("allocated_bytes", "peak", device)


def memory_reserved(device: _Device = None) -> int:
    return _figure("reserved_bytes", "current", device)


def reset_peak_memory_stats(device: _Device = None) -> None:
    torch._C._accelerator_resetPeakStats(_index(device))


def mem_get_info(device: _Device = None) -> tuple[int, int]:
    free, total = torch._C._accelerator_getMemoryInfo(_index(device))
    return free, total


def empty_cache() -> None:
    torch._C._accelerator_emptyCache()


def set_per_process_memory_fraction(fraction: float, device: _Device = None) -> None:
    extension().set_fraction(_index(device), fraction)


def get_per_process_memory_fraction(device: _Device = None) -> float:
    return float(extension().get_fraction(_index(device)))


def get_allocator_backend() -> str:
    return "native"


def host_register(address: int, nbytes: int) -> None:
    """As cudaHostRegister: the copies of this memory are queued. Raises RuntimeError where a part is registered."""
    extension().host_register(address, nbytes)


def host_unregister(address: int) -> None:
    """As cudaHostUnregister, which waits for the devices as well."""
    for index in range(device_count()):
        synchronize(index)
    extension().host_unregister(address)


_ERRORS = {
    712: "part or all of the requested memory range is already mapped",
    713: "pointer does not correspond to a registered memory region",
}


class _Runtime:
    """As `torch.cuda.cudart()`: the calls give a status, which `check_error` takes."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        try:
            host_register(address, nbytes)
        except RuntimeError:
            return 712
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        try:
            host_unregister(address)
        except RuntimeError:
            return 713
        return 0


def cudart() -> _Runtime:
    return _Runtime()


def check_error(status: int) -> None:
    if status:
        raise RuntimeError(f"CUDA error: {_ERRORS.get(status, status)}")


class Carried(NamedTuple):
    """Copies and bytes that crossed a link since the start of the process."""

    copies: int
    nbytes: int


def carried(direction: str, device: _Device = None) -> Carried:
    """What crossed from the host ("in") or to it ("out")."""
    asked = extension().carried_in if direction == "in" else extension().carried_out
    return Carried(*asked(_index(device)))


class Launches(NamedTuple):
    """Kernels of one operator since the start of the process."""

    queued: int
    at_once: int


def launches() -> dict[str, Launches]:
    """By operator, how many kernels were queued, and how many ran at once because the host had to know."""
    return {name: Launches(*pair) for name, pair in extension().counts().items()}


# -- random numbers and autocast -------------------------------------------------------------------------------------


def manual_seed(seed: int) -> None:
    default_generators[current_device()].manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    if _is_in_bad_fork():
        return
    for generator in default_generators:
        generator.manual_seed(int(seed))


def seed() -> None:
    default_generators[current_device()].seed()


def initial_seed() -> int:
    return default_generators[current_device()].initial_seed()


def get_rng_state(device: _Device = "sim") -> Tensor:
    return default_generators[_index(device)].get_state()


def set_rng_state(new_state: Tensor, device: _Device = "sim") -> None:
    default_generators[_index(device)].set_state(new_state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16, torch.float32]
