"""Direct: a store that moves device memory itself gets it after its kernel, and big transfers only. And the handoff of
a CPU's tensors, which is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from io_backends import Buffer, BufferPool, PosixStore, Ticket
from support.engine import activation, chain
from support.exactness import assert_bit_equal
from tba import OffloadConfig, Offloader
from tba._device import streams

LARGE = 4096  # elements; half of them are below the threshold
LENGTH = 4


class DirectStore(PosixStore):
    """Says that it takes device memory; remembers what it was given, and what was waited for."""

    takes_device_memory = True
    threshold_bytes = 4 * LARGE

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, threads=1)
        self.direct: list[str] = []

    def write(self, buffer: Buffer, *, before: Callable[[], None] | None = None, **others: Any) -> Ticket:
        assert before is None, "a write begins when its event has passed, and waits for none"
        assert isinstance(buffer.owner, torch.Tensor)
        if buffer.owner.dtype is torch.uint8:
            self.direct.append("write")
        return super().write(buffer, **others)

    def read(self, location: Any, buffer: Buffer, *, before: Callable[[], None] | None = None, **others: Any) -> Ticket:
        if isinstance(before, Reached):
            self.direct.append("read")
            assert isinstance(buffer.owner, torch.Tensor)
        return super().read(location, buffer, before=before, **others)


class Reached:
    """Stands in for the wait for a stream."""

    waits = 0

    def __init__(self, stream: Any) -> None:
        pass

    def over(self) -> bool:
        type(self).waits += 1
        return True

    def __call__(self) -> None:
        type(self).waits += 1


@pytest.fixture
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of this CPU pass for those of a device with one stream."""
    monkeypatch.setattr(streams, "producer_stream", lambda tensor: "stream")
    monkeypatch.setattr(streams, "also_used", lambda tensor, stream: None)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda index: "stream")
    monkeypatch.setattr(streams, "_after", Reached)
    monkeypatch.setattr(Reached, "waits", 0)
    out = streams.out
    monkeypatch.setattr(streams, "out", lambda source, begin, nbytes, *_, **__: out(source, begin, nbytes, None, None))
    # As to a device: a copy, which its target's version counter counts.
    monkeypatch.setattr(streams, "into", lambda host, *_, **__: (torch.empty_like(host).copy_(host), None))
    monkeypatch.setattr(streams, "target", lambda nbytes, device: None)


@pytest.mark.usefixtures("_device")
def test_what_was_copied_in_ahead_is_not_read_again(scratch: Path) -> None:
    leaf, x = activation(LARGE // 2)
    with Offloader(config=OffloadConfig(tier="nvme", min_tensor_bytes=0, storage_paths=scratch)) as offload:
        y = chain(x, LENGTH)
        y = y * y  # saves it twice
    del x
    offload.flush()
    y.sum().backward()
    stats = offload.stats()
    offload.close()
    assert leaf.grad is not None
    assert stats.read_bytes == stats.written_bytes >= stats.offloaded_bytes > 0


@pytest.mark.usefixtures("_device")
@pytest.mark.parametrize(("elements", "direct"), [(LARGE, True), (LARGE // 2, False)])
def test_big_transfers_go_straight_from_and_to_device_memory(elements: int, direct: bool, scratch: Path) -> None:
    store = DirectStore(scratch)
    config = OffloadConfig(tier="nvme", min_tensor_bytes=0, prefetch_bytes=0)
    offload = Offloader(config=config, store=store)
    leaf, x = activation(elements)
    for _ in range(2):
        leaf.grad = None
        with offload:
            y = chain(x, LENGTH)
        offload.flush()
        y.sum().backward(retain_graph=True)
        del y
    plain = leaf.detach().clone().requires_grad_()
    chain(plain + 0, LENGTH).sum().backward()
    assert_bit_equal(leaf.grad, plain.grad)
    stats = offload.stats()
    offload.close()
    assert stats.read_bytes == stats.written_bytes >= stats.offloaded_bytes > 0  # each once
    assert stats.errors == 0
    assert store.direct.count("write") == store.direct.count("read") == (2 * LENGTH if direct else 0)
    assert Reached.waits == len(store.direct)


def test_memory_read_into_is_known_to_be_of_the_stream_it_was_asked_for_on(monkeypatch: pytest.MonkeyPatch) -> None:
    current, told = ["a"], list[str]()
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda index: current[0])
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: told.append(stream))
    monkeypatch.setattr(streams, "_after", Reached)
    target, ready, buffer, _ = streams.borrow(16, torch.device("cpu"))
    assert buffer.address == target.data_ptr()
    for current[0] in ("b", "a"):  # the read may end, and be noticed, while another stream is current
        streams.use(target, ready)
    assert told == ["b"], "the allocator must know of every other stream that uses the memory"


def test_on_a_cpu_nothing_is_copied_and_nothing_waits() -> None:
    tensor = torch.arange(8.0)
    assert streams.producer_stream(tensor) is None
    assert not streams.capturing(tensor)
    buffer, before = streams.out(tensor, 8, 16, None, None)
    assert before is None
    assert (buffer.address, buffer.nbytes) == (tensor.data_ptr() + 8, 16)
    assert buffer.owner is tensor
    whole, ready = streams.into(tensor, torch.device("cpu"), None)
    assert ready is None
    assert whole is tensor
    streams.use(tensor, ready)
    kept, buffer = BufferPool(512).lease(100, 48)
    assert streams.host_bytes(kept).data_ptr() == buffer.address
