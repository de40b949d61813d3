"""Streams: the order they promise, on a simulated device that runs queued work in any order that order allows."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch

from io_backends import BufferPool, StoreFull
from support.exactness import assert_bit_equal
from support.simulated_cuda import PAGE_BYTES, DeviceTensor, SimulatedCuda, SimulatedTorch, Stream
from tba._device import streams as _streams

GPU = torch.device("cuda", 0)
SECOND_GPU = torch.device("cuda", 1)
CPU = torch.device("cpu")
N = 64
POOL = BufferPool(PAGE_BYTES)
SEEDS = range(25)


@pytest.fixture
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SimulatedTorch:
    """`_streams` on a simulated device; indirect parameter: the seed of its schedule."""
    fake = SimulatedTorch(SimulatedCuda(getattr(request, "param", 0)))
    monkeypatch.setattr(_streams, "torch", fake)
    monkeypatch.setattr(_streams, "function", lambda kind, name: getattr(fake.cuda, name, None))
    monkeypatch.setattr(_streams, "module_of", lambda kind: fake.cuda)
    monkeypatch.setattr(_streams, "_streams", {})
    return fake


any_schedule = pytest.mark.parametrize("fake", SEEDS, indirect=True)


def pattern(number: int) -> torch.Tensor:
    return torch.randint(0, 256, (N,), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))


def produce(gpu: SimulatedCuda, value: torch.Tensor, stream: Stream) -> DeviceTensor:
    """A tensor allocated on `stream`, which a kernel there fills."""
    with gpu.stream(stream):
        tensor = gpu.empty(N, stream.device)
    there = tensor.bytes
    stream.enqueue("kernel fills", lambda: there.copy_(value))
    return tensor


def scribble(gpu: SimulatedCuda, stream: Stream) -> None:
    """What any later operator does: take memory that is free on `stream`, and write to it."""
    produce(gpu, torch.full((N,), 0xDD, dtype=torch.uint8), stream)


def view_of(gpu: SimulatedCuda, whole: Any, device: torch.device = GPU) -> DeviceTensor:
    return DeviceTensor(gpu, device, whole.untyped_storage())


def consume(tensor: DeviceTensor, stream: Stream) -> list[torch.Tensor]:
    """A kernel on `stream` that reads; the list has what it read once it has run."""
    seen: list[torch.Tensor] = []
    there = tensor.bytes
    stream.enqueue("kernel reads", lambda: seen.append(there.clone()))
    return seen


def host_view(buffer: Any) -> torch.Tensor:
    assert isinstance(buffer.owner, torch.Tensor)
    assert buffer.owner.data_ptr() == buffer.address
    return buffer.owner


# -- out ---------------------------------------------------------------------------------------------------------------


def test_out_queues_record_wait_copy_record_in_this_order(fake: SimulatedTorch) -> None:
    gpu = fake.cuda
    producer = gpu.current_stream(GPU)
    source = produce(gpu, pattern(0), producer)
    gpu.log.clear()
    _, departure = _streams.out(source, 0, N, producer, POOL)
    side = _streams._side_stream(GPU, "out")
    assert gpu.log == [
        f"{producer.name}: record",
        f"{side.name}: wait event of {producer.name}",
        f"{side.name}: copy out",
        f"{side.name}: record",
    ]
    gpu.log.clear()
    assert departure is not None
    departure()
    assert gpu.log == [f"host: wait event of {side.name} on {GPU}"], "waits for its own copy, and for nothing else"


@any_schedule
def test_what_is_copied_out_is_what_the_kernel_wrote(fake: SimulatedTorch) -> None:
    gpu = fake.cuda
    producer = gpu.make_stream("producer", GPU)
    source = produce(gpu, pattern(0), producer)
    buffer, departure = _streams.out(source, 16, 32, producer, POOL)
    assert departure is not None
    departure()
    assert_bit_equal(host_view(buffer).clone(), pattern(0)[16:48].clone())


@any_schedule
def test_the_source_may_be_dropped_while_its_copy_is_under_way(fake: SimulatedTorch) -> None:
    gpu = fake.cuda
    producer = gpu.current_stream(GPU)
    source = produce(gpu, pattern(0), producer)
    buffer, departure = _streams.out(source, 0, N, producer, POOL)
    del source
    for _ in range(3):
        scribble(gpu, producer)
    assert departure is not None
    departure()
    assert_bit_equal(host_view(buffer).clone(), pattern(0))


def test_the_memory_is_free_as_soon_as_the_copy_has_been_waited_for(fake: SimulatedTorch) -> None:
    gpu = fake.cuda
    producer = gpu.current_stream(GPU)
    source = produce(gpu, pattern(0), producer)
    block = source.untyped_storage().block
    _, departure = _streams.out(source, 0, N, producer, POOL)
    del source
    other = gpu.empty(N, GPU)
    assert other.untyped_storage().block is not block
    assert departure is not None
    departure()
    _streams._side_stream(GPU, "out").enqueue("another copy", lambda: None)  # does not hold this memory back
    assert gpu.empty(N, GPU).untyped_storage().block is block, "the departure, done, still keeps its source"


@any_schedule
def test_a_cancelled_departure_frees_its_source_only_behind_the_copy(fake: SimulatedTorch) -> None:
    gpu = fake.cuda
    producer = gpu.current_stream(GPU)
    source = produce(gpu, pattern(0), producer)
    buffer, departure = _streams.out(source, 0, N, producer, POOL)
    del source, departure
    scribble(gpu, producer)
    gpu.run()
    assert_bit_equal(host_view(buffer).clone(), pattern(0))


@any_schedule
def test_memory_of_another_stream_is_not_reused_before_its_producer_is_done(fake: SimulatedTorch) -> None:
    # The graph would keep it until backward; the engine lets go of it earlier, while the producer may still read it.
    gpu = fake.cuda
    owner, producer = gpu.current_stream(GPU), gpu.make_stream("producer", GPU)
    source = produce(gpu, pattern(0), owner)
    producer.wait_stream(owner)
    _, departure = _streams.out(source, 0, N, producer, POOL)
    assert departure is not None
    departure()
    read = consume(source, producer)
    del source
    scribble(gpu, owner)
    gpu.run()
    assert_bit_equal(read[0], pattern(0))


def test_a_worker_waits_on_the_device_of_the_copy(fake: SimulatedTorch) -> None:
    gpu = fake.cuda
    producer = gpu.current_stream(SECOND_GPU)
    source = produce(gpu, pattern(0), producer)
    _, departure = _streams.out(source, 0, N, producer, POOL)
    assert departure is not None
    side = _streams._side_stream(SECOND_GPU, "out")
    assert side.device == SECOND_GPU
    assert side is not _streams._side_stream(GPU, "out")
    worker = threading.Thread(target=departure)
    worker.start()
    worker.join()
    assert gpu.log[-1] == f"host: wait event of {side.name} on {SECOND_GPU}"
    assert gpu.here.device == GPU, "the calling thread's device has changed"


# -- into --------------------------------------------------------------------------------------------------------------


def test_into_queues_allocate_wait_copy_record_in_this_order(fake: SimulatedTorch) -> None:
    gpu = fake.cuda
    consumer = gpu.make_stream("consumer", GPU)
    with gpu.stream(consumer):
        whole, ready = _streams.into(pattern(1), GPU, POOL)
    side = _streams._side_stream(GPU, "in")
    assert whole.untyped_storage().block.stream is consumer
    assert gpu.log == [
        f"{consumer.name}: record",
        f"{side.name}: wait event of {consumer.name}",
        f"{side.name}: copy in",
        f"{side.name}: record",
    ]
    gpu.log.clear()
    with gpu.stream(consumer):
        _streams.use(view_of(gpu, whole), ready)
    assert gpu.log == [f"{consumer.name}: wait event of {side.name}"]


@any_schedule
def test_what_is_copied_in_is_there_when_it_is_used_on_any_stream_and_again(fake: SimulatedTorch) -> None:
    gpu = fake.cuda
    consumer, other = gpu.current_stream(GPU), gpu.make_stream("other", GPU)
    whole, ready = _streams.into(pattern(1), GPU, POOL)
    reads = []
    for stream in (other, consumer, other):
        with gpu.stream(stream):
            tensor = view_of(gpu, whole)
            _streams.use(tensor, ready)
            reads.append(consume(tensor, stream))
    del tensor, whole, ready
    scribble(gpu, consumer)
    gpu.run()
    for read in reads:
        assert_bit_equal(read[0], pattern(1))


@any_schedule
def test_what_fills_fresh_memory_in_deterministic_mode_does_so_before_the_copy(fake: SimulatedTorch) -> None:
    gpu, fake.fills = fake.cuda, True
    whole, ready = _streams.into(pattern(1), GPU, POOL)
    tensor = view_of(gpu, whole)
    _streams.use(tensor, ready)
    read = consume(tensor, gpu.current_stream(GPU))
    gpu.run()
    assert_bit_equal(read[0], pattern(1))


@any_schedule
def test_a_recycled_block_is_not_overwritten_before_its_last_reader_has_run(fake: SimulatedTorch) -> None:
    gpu = fake.cuda
    consumer = gpu.current_stream(GPU)
    earlier = produce(gpu, pattern(0), consumer)
    block = earlier.untyped_storage().block
    read = consume(earlier, consumer)
    del earlier
    whole, ready = _streams.into(pattern(1), GPU, POOL)
    assert whole.untyped_storage().block is block, "nothing was recycled: the test proves nothing"
    _streams.use(view_of(gpu, whole), ready)
    gpu.run()
    assert_bit_equal(read[0], pattern(0))


@any_schedule
def test_a_copy_that_nobody_used_does_not_write_into_reused_memory(fake: SimulatedTorch) -> None:
    gpu = fake.cuda
    consumer = gpu.current_stream(GPU)
    whole, ready = _streams.into(pattern(1), GPU, POOL)
    del whole, ready
    later = produce(gpu, pattern(2), consumer)
    read = consume(later, consumer)
    gpu.run()
    assert_bit_equal(read[0], pattern(2))


def test_used_memory_is_free_at_once_however_far_behind_the_device_is(fake: SimulatedTorch) -> None:
    # Nothing has run when it is asked for again: a program far ahead of the device needs no more memory for that.
    gpu = fake.cuda
    consumer = gpu.current_stream(GPU)
    blocks = set()
    for number in range(10):
        whole, ready = _streams.into(pattern(number), GPU, POOL)
        tensor = view_of(gpu, whole)
        _streams.use(tensor, ready)
        consume(tensor, consumer)
        blocks.add(whole.untyped_storage().block)
        del tensor, whole, ready
    assert len(blocks) == 1
    gpu.run()


# -- both, at random ---------------------------------------------------------------------------------------------------


def steps_of_training(fake: SimulatedTorch, chance: random.Random) -> None:
    """Tensors go out and come back, in random order, from and to random streams, some given up half-way."""
    gpu = fake.cuda
    streams = [gpu.current_stream(GPU), gpu.make_stream("a", GPU), gpu.make_stream("b", GPU)]
    out: list[tuple[int, torch.Tensor, Any]] = []
    stored: list[tuple[int, torch.Tensor]] = []
    landed: list[tuple[int, Any, Any]] = []
    reads: list[tuple[int, list[torch.Tensor]]] = []
    for number in range(40):
        stream = chance.choice(streams)
        what = chance.choice(["save", "save", "arrive", "arrive", "restore", "restore", "use", "use", "give up", "run"])
        if what == "save":
            source = produce(gpu, pattern(number), stream)
            buffer, departure = _streams.out(source, 0, N, stream, POOL)
            out.append((number, host_view(buffer), departure))
            del source
            scribble(gpu, stream)
        elif what == "arrive" and out:
            number, host, departure = out.pop(chance.randrange(len(out)))
            departure()
            stored.append((number, host))
        elif what == "restore" and stored:
            number, host = chance.choice(stored)
            with gpu.stream(stream):
                landed.append((number, *_streams.into(host, GPU, POOL)))
        elif what == "use" and landed:
            number, whole, ready = landed.pop(chance.randrange(len(landed)))
            with gpu.stream(stream):
                tensor = view_of(gpu, whole)
                _streams.use(tensor, ready)
            reads.append((number, consume(tensor, stream)))
            del whole, ready, tensor
            scribble(gpu, stream)
        elif what == "give up":
            dropped = chance.choice([out, landed])
            if dropped:
                del dropped[chance.randrange(len(dropped))]
            for each in streams:
                scribble(gpu, each)
        elif what == "run":
            gpu.run(steps=chance.randrange(10))
    for _, _, departure in out:
        departure()
    gpu.run()
    for number, host in stored + [(number, host) for number, host, _ in out]:
        assert_bit_equal(host.clone(), pattern(number))
    for number, read in reads:
        assert_bit_equal(read[0], pattern(number))


@pytest.mark.parametrize("fake", range(60), indirect=True)
def test_random_training_moves_every_byte_right(fake: SimulatedTorch, request: pytest.FixtureRequest) -> None:
    steps_of_training(fake, random.Random(request.node.callspec.params["fake"]))


# -- host memory -------------------------------------------------------------------------------------------------------


def test_bytes_of_a_device_go_to_whole_pages_that_nobody_else_has(fake: SimulatedTorch) -> None:
    gpu, pool = fake.cuda, BufferPool(PAGE_BYTES)
    source = produce(gpu, pattern(0), gpu.current_stream(GPU))
    buffer, departure = _streams.out(source, 0, N, gpu.current_stream(GPU), pool)
    assert buffer.address % PAGE_BYTES == 0
    assert buffer.padded
    assert buffer.given
    assert pool.leased_bytes == PAGE_BYTES
    assert departure is not None
    departure()
    assert_bit_equal(host_view(buffer).clone(), pattern(0))
    del buffer, departure
    pool.trim()
    assert pool.leased_bytes == 0


@any_schedule
def test_host_memory_is_not_used_again_before_the_copy_from_it_is_over(fake: SimulatedTorch) -> None:
    gpu, pool = fake.cuda, BufferPool(PAGE_BYTES)
    host = _streams.host_bytes(pool.lease(N)[0])
    host.copy_(pattern(1))
    whole, ready = _streams.into(host, GPU, pool)
    del host
    for _ in range(2):
        _streams.host_bytes(pool.lease(N)[0]).fill_(0xDD)
    tensor = view_of(gpu, whole)
    _streams.use(tensor, ready)
    read = consume(tensor, gpu.current_stream(GPU))
    gpu.run()
    assert_bit_equal(read[0], pattern(1))
    pool.trim()
    assert pool.leased_bytes == 0


@any_schedule
def test_host_memory_is_not_used_again_before_an_abandoned_copy_to_it_is_over(fake: SimulatedTorch) -> None:
    gpu, pool = fake.cuda, BufferPool(PAGE_BYTES)
    source = produce(gpu, pattern(1), gpu.current_stream(GPU))
    abandoned = _streams.out(source, 0, N, gpu.current_stream(GPU), pool)
    del abandoned, source
    later = _streams.host_bytes(pool.lease(N)[0])
    later.copy_(pattern(2))
    gpu.run()
    assert_bit_equal(later.clone(), pattern(2))


def test_without_room_in_host_memory_nothing_is_queued(fake: SimulatedTorch) -> None:
    gpu, pool = fake.cuda, BufferPool(PAGE_BYTES, PAGE_BYTES, budget_bytes=PAGE_BYTES)
    source = produce(gpu, pattern(0), gpu.current_stream(GPU))
    kept = _streams.out(source, 0, N, gpu.current_stream(GPU), pool)
    with pytest.raises(StoreFull, match="budget"):
        _streams.out(source, 0, N, gpu.current_stream(GPU), pool)
    assert sum("copy out" in line for line in gpu.log) == 1
    del kept
