"""Copies out of a device and back: what `tba._device.streams` promises by itself, while a stream is held."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from io_backends import Buffer, BufferPool, PosixStore, StoreFull
from tba._device import streams
from tba._device.pinning import make_arena
from tba._errors import StorageError
from tba.cli._doctor import way_probe

N = 1 << 16
PAGE_BYTES = 4096


def here() -> torch.device:
    return torch.device("sim", 0)


@pytest.fixture
def pool(sim: ModuleType) -> Any:
    """Pinned memory of the host."""
    return make_arena(here(), 64 << 20, PAGE_BYTES)


def made(value: float) -> Tensor:
    """A tensor that a kernel on the current stream fills."""
    return torch.full((N,), value, device=here())


def host_of(pool: Any, value: float) -> Tensor:
    host = streams.host_bytes(pool.lease(4 * N)[0])
    host.view(torch.float32).fill_(value)
    return host


def numbers(of: Buffer | Tensor) -> list[float]:
    """What is in memory of the host now, or of the device once all has run."""
    found: Any = of.owner if isinstance(of, Buffer) else of
    if found.device.type != "cpu":
        torch.accelerator.synchronize()  # whichever stream made it
    return found.cpu().view(torch.float32).unique().tolist()  # type: ignore[no-any-return]


def out(source: Tensor, pool: Any, producer: Any = None) -> tuple[Buffer, streams.Departure]:
    buffer, departure = streams.out(source, 0, 4 * N, producer or streams.current(here()), pool)
    assert departure is not None
    return buffer, departure


def test_what_is_copied_out_is_what_the_kernel_wrote(sim: ModuleType, pool: Any) -> None:
    with sim.held(sim.current_stream()):
        buffer, departure = out(made(1.0), pool)
        time.sleep(0.1)  # a copy that does not wait is over by then
        assert not departure.over()
    departure()
    assert numbers(buffer) == [1.0]


def test_a_source_stays_until_its_copy_is_over_and_is_free_then(sim: ModuleType, pool: Any) -> None:
    side = streams._side_stream(here(), "out")
    source = made(1.0)
    address = source.data_ptr()
    with sim.held(side):
        buffer, departure = out(source, pool)
        del source
        other = made(2.0)
        assert other.data_ptr() != address
    while not departure.over():
        time.sleep(0.001)
    with sim.held(side):  # another copy does not hold this memory back
        assert made(3.0).data_ptr() == address
    assert numbers(buffer) == [1.0]


def test_an_abandoned_copy_frees_its_source_only_behind_it(sim: ModuleType, pool: Any) -> None:
    with sim.held(streams._side_stream(here(), "out")):
        buffer, departure = out(made(1.0), pool)
        del departure
        others = [made(2.0) for _ in range(3)]
        torch.accelerator.current_stream().synchronize()
    sim.synchronize()
    assert numbers(buffer) == [1.0]
    del others


def test_memory_of_another_stream_is_not_reused_before_its_producer_is_done(sim: ModuleType, pool: Any) -> None:
    """The graph would keep it until backward; the engine lets go of it earlier, while the producer may read it."""
    producer, source = sim.Stream(here()), made(1.0)
    producer.wait_stream(sim.current_stream())
    _, departure = out(source, pool, producer)
    departure()
    with sim.held(producer):
        with sim.stream(producer):
            read = source * 1
        del source
        others = [made(2.0) for _ in range(3)]
        sim.current_stream().synchronize()
    assert numbers(read) == [1.0]
    del others


def test_what_is_copied_in_is_there_when_it_is_used_on_any_stream_and_again(sim: ModuleType, pool: Any) -> None:
    consumer, other, reads = sim.current_stream(), sim.Stream(here()), []
    with sim.held(streams._side_stream(here(), "in")):
        whole, ready = streams.into(host_of(pool, 1.0), here(), pool)
        for stream in (other, consumer, other):
            with sim.stream(stream):
                streams.use(whole, ready)
                reads.append(whole.view(torch.float32) * 1)
        del whole, ready
        scribbled = made(2.0)
    assert [numbers(read) for read in reads] == [[1.0]] * 3
    del scribbled


def test_a_recycled_block_is_not_overwritten_before_its_last_reader_has_run(sim: ModuleType, pool: Any) -> None:
    earlier = made(1.0)
    with sim.held(sim.current_stream()):
        read, address = earlier * 1, earlier.data_ptr()
        del earlier
        whole, ready = streams.into(host_of(pool, 2.0), here(), pool)
        assert whole.data_ptr() == address, "nothing was recycled: the test proves nothing"
        streams.use(whole, ready)
        time.sleep(0.1)  # a copy that does not wait is over by then
    assert (numbers(read), numbers(whole)) == ([1.0], [2.0])


def test_a_copy_that_nobody_used_does_not_write_into_reused_memory(sim: ModuleType, pool: Any) -> None:
    with sim.held(streams._side_stream(here(), "in")):
        whole, ready = streams.into(host_of(pool, 1.0), here(), pool)
        del whole, ready
        later = [made(2.0) for _ in range(3)]
        sim.current_stream().synchronize()
    assert [numbers(each) for each in later] == [[2.0]] * 3


def test_used_memory_is_free_at_once_however_far_behind_the_device_is(sim: ModuleType, pool: Any) -> None:
    """Nothing has run when it is asked for again: a program far ahead of the device needs no more memory for that."""
    addresses = set()
    with sim.held(sim.current_stream()):
        for number in range(10):
            whole, ready = streams.into(host_of(pool, float(number)), here(), pool)
            streams.use(whole, ready)
            addresses.add(whole.data_ptr())
            del whole, ready
    assert len(addresses) == 1


def test_host_memory_is_not_used_again_before_an_abandoned_copy_to_it_is_over(sim: ModuleType, pool: Any) -> None:
    with sim.held(streams._side_stream(here(), "out")):
        out(made(1.0), pool)  # of which nobody keeps anything
        later = host_of(pool, 2.0)
    sim.synchronize()
    assert numbers(later) == [2.0]


def test_bytes_of_a_device_go_to_whole_pages_that_nobody_else_has(pool: Any) -> None:
    buffer, departure = streams.out(made(1.0), 16, 64, streams.current(here()), pool)
    assert (buffer.address % PAGE_BYTES, buffer.padded, buffer.given) == (0, True, True)
    assert pool.leased_bytes == PAGE_BYTES
    assert departure is not None
    departure()
    del buffer, departure
    pool.trim()
    assert pool.leased_bytes == 0


def test_without_room_in_host_memory_nothing_is_queued(sim: ModuleType) -> None:
    pool, source = BufferPool(PAGE_BYTES, PAGE_BYTES, budget_bytes=PAGE_BYTES), made(1.0)
    address = source.data_ptr()
    with sim.held(streams._side_stream(here(), "out")):
        with pytest.raises(StoreFull, match="budget"):
            out(source, pool)
        del source
        assert made(2.0).data_ptr() == address


def test_the_doctor_sees_wrong_bytes_on_the_way_through_pinned_memory(
    sim: ModuleType, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(way_probe, "BLOCK_BYTES", 1 << 16)
    with closing(PosixStore(scratch)) as store:
        assert min(way_probe._measured(store, here())) > 0
        into = streams.into
        monkeypatch.setattr(streams, "into", lambda host, *rest: into(host ^ 1, *rest))
        with pytest.raises(StorageError, match=f"not all of {8 << 16} bytes"):
            way_probe._measured(store, here())


class Recorded(TorchDispatchMode):
    """Notes on which tensors `record_stream` is called, and does not let it through."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.record_stream.default:
            self.tensors.append(args[0])
            return None
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("turned", [lambda x: x.conj(), lambda x: x.conj().imag], ids=["conjugated", "negated"])
def test_the_allocator_hears_of_a_turned_tensor_s_own_memory(
    sim: ModuleType, turned: Callable[[Tensor], Tensor]
) -> None:
    """PyTorch's own `record_stream` makes a copy of such a tensor, tells of that, and writes where it may not."""
    tensor = turned(torch.ones(4, dtype=torch.complex64, device=here()))
    producer = sim.current_stream()
    with Recorded() as recorded, sim.stream(sim.Stream()):
        streams.also_used(tensor, producer)
        streams.goes_early(tensor, producer)
        streams.Arrival(None, producer).wait(tensor)
    assert len(recorded.tensors) == 3
    for told in recorded.tensors:
        assert not told.is_conj()
        assert not told.is_neg()
        assert told.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def test_a_copy_in_waits_for_nothing_that_was_launched_since_its_memory_was_taken(sim: ModuleType, pool: Any) -> None:
    """A read takes device memory when it is queued: when its bytes have come, the device has all of backward queued."""
    taken = streams.target(4 * N, here())
    sim.synchronize()
    with sim.held(sim.current_stream()):
        arrived, arrival = streams.into(host_of(pool, 7.0), here(), pool, taken=taken)
        assert arrival is not None
        arrival._copied.synchronize()
    streams.use(arrived, arrival)
    assert numbers(arrived) == [7.0]
