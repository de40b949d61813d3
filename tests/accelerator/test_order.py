"""Order: whoever does not wait for another stream reads poison, and a block goes back to its own stream alone."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from support import accelerator

N = 1 << 16  # elements: a block of 256 KiB


def poisoned(tensor: Tensor) -> int:
    """How many elements of a float tensor are poison."""
    return int(tensor.view(torch.int32).eq(-1).sum())


@pytest.fixture
def pinned(sim: ModuleType) -> Tensor:
    return torch.zeros(N, pin_memory=True)


def test_fresh_memory_is_poison(sim: ModuleType, device: torch.device) -> None:
    assert poisoned(torch.empty(N, device=device).cpu()) == N


def test_freed_memory_is_poison(sim: ModuleType, device: torch.device) -> None:
    first = torch.ones(N, device=device)
    address = first.data_ptr()
    del first
    second = torch.empty(N, device=device)
    assert second.data_ptr() == address
    assert poisoned(second.cpu()) == N


@pytest.mark.parametrize("waits", [True, False])
def test_a_copy_out_that_does_not_wait_for_the_kernel_reads_poison(
    sim: ModuleType, device: torch.device, pinned: Tensor, waits: bool
) -> None:
    side = sim.Stream(device)
    with sim.held(sim.current_stream(device)):
        made = torch.ones(N, device=device)
        if waits:
            side.wait_stream(sim.current_stream(device))
        with sim.stream(side):
            pinned.copy_(made, non_blocking=True)
        if not waits:
            side.synchronize()
    side.synchronize()
    assert poisoned(pinned) == (0 if waits else N)


@pytest.mark.parametrize("waits", [True, False])
def test_a_consumer_that_does_not_wait_for_a_copy_in_reads_poison(
    sim: ModuleType, device: torch.device, pinned: Tensor, waits: bool
) -> None:
    side = sim.Stream(device)
    target = torch.empty(N, device=device)
    copied = sim.Event()
    with sim.held(side):
        with sim.stream(side):
            target.copy_(pinned, non_blocking=True)
            copied.record(side)
        if waits:
            sim.current_stream(device).wait_event(copied)
        result = target + 1
        if not waits:
            sim.current_stream(device).synchronize()
    sim.synchronize(device)
    assert int(result.isnan().sum()) == (0 if waits else N)


@pytest.mark.parametrize("recorded", [True, False])
def test_a_source_freed_while_a_copy_reads_it_is_overwritten(
    sim: ModuleType, device: torch.device, pinned: Tensor, recorded: bool
) -> None:
    side = sim.Stream(device)
    source = torch.ones(N, device=device)
    side.wait_stream(sim.current_stream(device))
    with sim.held(side):
        with sim.stream(side):
            pinned.copy_(source, non_blocking=True)
        if recorded:
            source.record_stream(side)
        del source
        somebodys = torch.full((N,), 7.0, device=device)
        sim.current_stream(device).synchronize()
    side.synchronize()
    assert pinned.unique().tolist() == ([1.0] if recorded else [7.0])
    assert float(somebodys[0]) == 7.0


def test_half_a_copy_is_there_before_its_time_is_over(sim: ModuleType, device: torch.device, pinned: Tensor) -> None:
    """A target that a kernel still reads, and a source that goes during the copy, both show."""
    accelerator.configure(out_latency_s=0.05)
    side = sim.Stream(device)
    source = torch.ones(N, device=device)
    side.wait_stream(sim.current_stream(device))
    sim.synchronize(device)
    with sim.stream(side):
        pinned.copy_(source, non_blocking=True)
    while not pinned[0].item():
        pass
    source.fill_(2.0)
    sim.current_stream(device).synchronize()
    seen_early = side.query()
    side.synchronize()
    assert pinned[: N // 2].unique().tolist() == [1.0]
    assert seen_early or pinned[N // 2 :].unique().tolist() == [2.0]


def test_a_freed_block_goes_to_its_own_stream_at_once(sim: ModuleType, device: torch.device) -> None:
    with sim.held(sim.current_stream(device)):
        first = torch.ones(N, device=device)
        address = first.data_ptr()
        doubled = first * 2
        del first
        second = torch.full((N,), 3.0, device=device)
        assert second.data_ptr() == address
    assert doubled.unique().tolist() == [2.0]
    assert second.unique().tolist() == [3.0]


def test_a_recorded_block_waits_for_the_stream_it_was_recorded_on(sim: ModuleType, device: torch.device) -> None:
    side = sim.Stream(device)
    before = sim.memory_allocated(device)
    first = torch.ones(N, device=device)
    address = first.data_ptr()
    with sim.held(side):
        first.record_stream(side)
        del first
        assert torch.empty(N, device=device).data_ptr() != address
        active = sim.memory_stats(device)["active_bytes.all.current"]
        assert sim.memory_allocated(device) == before
        assert active == before + 4 * N
    side.synchronize()
    assert torch.empty(N, device=device).data_ptr() == address


def test_a_pinned_block_is_not_handed_out_while_a_copy_uses_it(sim: ModuleType, device: torch.device) -> None:
    target = torch.empty(N, device=device)
    stream = sim.current_stream(device)
    with sim.held(stream):
        host = torch.ones(N, pin_memory=True)
        address = host.data_ptr()
        target.copy_(host, non_blocking=True)
        del host
        assert torch.zeros(N, pin_memory=True).data_ptr() != address
    assert target.unique().tolist() == [1.0]


def test_a_copy_from_other_memory_has_been_read_on_return(sim: ModuleType, device: torch.device) -> None:
    host = torch.ones(N)
    target = torch.empty(N, device=device)
    with sim.held(sim.current_stream(device)):
        target.copy_(host, non_blocking=True)
        host.zero_()
    assert target.unique().tolist() == [1.0]


def test_a_row_of_a_larger_tensor_is_copied_both_ways(sim: ModuleType, device: torch.device) -> None:
    wide = torch.arange(9.0).view(1, 9)
    row = wide[:, :-1]  # contiguous, though its stride over the one row is another than of a tensor of its own
    assert torch.equal(row.to(device).cpu(), row)
    back = torch.empty(1, 8, pin_memory=True)
    back.copy_(wide.to(device)[:, :-1])
    assert torch.equal(back, row)


@pytest.mark.parametrize("seed", range(3))
def test_random_delays_show_a_missing_wait(sim: ModuleType, device: torch.device, pinned: Tensor, seed: int) -> None:
    accelerator.configure(delay_s=0.01, seed=seed)
    side = sim.Stream(device)
    wrong = 0
    for _ in range(12):
        made = torch.ones(N, device=device)
        with sim.stream(side):
            pinned.copy_(made, non_blocking=True)
        made.record_stream(side)
        sim.synchronize(device)
        wrong += bool(poisoned(pinned))
        del made
    assert wrong
