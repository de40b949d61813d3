"""Memory of a device: out of the host's reach, limited, counted, and given back."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
from types import ModuleType

import pytest
import torch

from support import accelerator

MIB = 1 << 20
N = 1 << 16


@pytest.fixture
def device() -> torch.device:
    return torch.device("sim", 0)


@pytest.mark.parametrize(
    ("touch", "dies"),
    [
        ("ctypes.memset(tensor.data_ptr(), 0, 1)", True),
        ("bytes((ctypes.c_char * 1).from_address(tensor.data_ptr()))", True),
        ("tensor.zero_(); tensor.cpu()", False),
    ],
)
def test_a_host_that_touches_device_memory_dies(sim: ModuleType, touch: str, dies: bool) -> None:
    program = f"""
import ctypes, sys
sys.path[:0] = {sys.path!r}
import torch
from support import accelerator
accelerator.load()
tensor = torch.ones(16, device="sim")
torch.accelerator.synchronize()
{touch}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == (-signal.SIGSEGV if dies else 0), done.stderr


def test_memory_is_short_at_the_limit_and_comes_back(sim: ModuleType, device: torch.device) -> None:
    accelerator.configure(limit_bytes=64 * MIB)
    kept = [torch.empty(16 * MIB, dtype=torch.uint8, device=device) for _ in range(4)]
    with pytest.raises(torch.OutOfMemoryError, match=rf"Tried to allocate {16 * MIB} bytes"):
        torch.empty(16 * MIB, dtype=torch.uint8, device=device)
    assert sim.memory_stats(device)["num_ooms"] >= 1
    del kept[0]
    assert torch.empty(16 * MIB, dtype=torch.uint8, device=device).numel() == 16 * MIB


def test_memory_of_other_shapes_is_given_back_before_an_error(sim: ModuleType, device: torch.device) -> None:
    accelerator.configure(limit_bytes=64 * MIB)
    small = [torch.empty(12 * MIB, dtype=torch.uint8, device=device) for _ in range(5)]
    del small
    assert sim.memory_reserved(device) == 60 * MIB
    large = torch.empty(62 * MIB, dtype=torch.uint8, device=device)
    assert sim.memory_reserved(device) == 62 * MIB
    assert large.numel() == 62 * MIB


def test_a_block_that_a_stream_holds_is_awaited_before_an_error(sim: ModuleType, device: torch.device) -> None:
    accelerator.configure(limit_bytes=32 * MIB, out_latency_s=0.02)
    side = sim.Stream(device)
    host = torch.empty(24 * MIB, dtype=torch.uint8, pin_memory=True)
    first = torch.full((24 * MIB,), 5, dtype=torch.uint8, device=device)
    side.wait_stream(sim.current_stream(device))
    with sim.stream(side):
        host.copy_(first, non_blocking=True)
    first.record_stream(side)
    del first
    second = torch.zeros(24 * MIB, dtype=torch.uint8, device=device)
    assert host.unique().tolist() == [5]
    assert int(second.sum()) == 0


def test_a_limit_below_the_total_is_kept_too(sim: ModuleType, device: torch.device) -> None:
    accelerator.configure(limit_bytes=64 * MIB)
    sim.set_per_process_memory_fraction(0.5, device)
    assert sim.get_per_process_memory_fraction(device) == 0.5
    assert sim.get_device_properties(device).total_memory == 64 * MIB
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(34 * MIB, dtype=torch.uint8, device=device)


def test_the_figures_count_blocks_as_cuda_s_do(sim: ModuleType, device: torch.device) -> None:
    sim.empty_cache()
    allocated, reserved = sim.memory_allocated(device), sim.memory_reserved(device)
    free, total = sim.mem_get_info(device)
    sim.reset_peak_memory_stats(device)
    small, large, own = (torch.empty(n, dtype=torch.uint8, device=device) for n in (1, 2 * MIB, 18 * MIB + MIB // 2))
    assert sim.memory_allocated(device) == allocated + 512 + 20 * MIB + MIB // 2
    assert sim.memory_reserved(device) - reserved in (42 * MIB, 40 * MIB)  # a segment of small blocks may be there
    assert sim.mem_get_info(device) == (free - (sim.memory_reserved(device) - reserved), total)
    del small, large, own
    assert sim.memory_allocated(device) == allocated
    assert sim.max_memory_allocated(device) == allocated + 512 + 20 * MIB + MIB // 2
    nested = sim.memory_stats_as_nested_dict(device)
    assert nested["active_bytes"]["all"]["current"] == allocated
    assert nested["requested_bytes"]["all"]["peak"] >= 1 + 20 * MIB
    sim.empty_cache()
    assert sim.memory_reserved(device) == reserved
    assert torch.accelerator.memory_allocated(device) == allocated
    assert torch.accelerator.get_memory_info(device) == sim.mem_get_info(device)


def test_memory_given_back_is_fresh_when_it_comes_again(sim: ModuleType, device: torch.device) -> None:
    first = torch.ones(12 * MIB, dtype=torch.uint8, device=device)
    del first
    sim.empty_cache()
    assert torch.empty(12 * MIB, dtype=torch.uint8, device=device).cpu().unique().tolist() == [255]


def test_a_storage_grows_and_shrinks(sim: ModuleType, device: torch.device) -> None:
    tensor = torch.arange(N, device=device)
    storage = tensor.untyped_storage()
    before = sim.memory_allocated(device)
    storage.resize_(0)
    assert sim.memory_allocated(device) == before - 8 * N
    storage.resize_(8 * N)
    assert torch.equal(tensor.copy_(torch.arange(N)).cpu(), torch.arange(N))
    tensor.resize_(2 * N)
    assert torch.equal(tensor[:N].cpu(), torch.arange(N))


def test_bytes_are_set_over_a_storage(sim: ModuleType, device: torch.device) -> None:
    source = torch.arange(16, device=device, dtype=torch.int32)
    raw = torch.empty(0, dtype=torch.uint8, device=device).set_(source.untyped_storage(), 8, (16,), (1,))
    assert raw.data_ptr() == source.data_ptr() + 8
    assert raw.cpu().view(torch.int32).tolist() == [2, 3, 4, 5]
    whole = torch.empty(0, dtype=torch.int32, device=device)
    assert whole.set_(source).cpu().tolist() == list(range(16))
    assert whole.set_().numel() == 0


def test_pinned_memory_is_known_by_its_address(sim: ModuleType) -> None:
    assert torch.empty(4, pin_memory=True).is_pinned()
    assert torch.empty(4).pin_memory().is_pinned()
    plain = torch.empty(N)
    assert not plain.is_pinned()
    sim.host_register(plain.data_ptr(), 4 * N)
    assert plain.is_pinned()
    with pytest.raises(RuntimeError, match="already mapped"):
        sim.host_register(plain.data_ptr() + 4096, 4096)
    sim.host_unregister(plain.data_ptr())
    assert not plain.is_pinned()


def test_what_crosses_a_link_is_counted_and_takes_its_time(sim: ModuleType, device: torch.device) -> None:
    accelerator.configure(in_bytes_per_s=4 * N * 50, out_bytes_per_s=4 * N * 25)
    host = torch.ones(N, pin_memory=True)
    events = [sim.Event(enable_timing=True) for _ in range(3)]
    into, out = sim.carried("in", device), sim.carried("out", device)
    events[0].record()
    there = host.to(device, non_blocking=True)
    events[1].record()
    host.copy_(there, non_blocking=True)
    events[2].record()
    sim.synchronize(device)
    assert sim.carried("in", device) == (into.copies + 1, into.nbytes + 4 * N)
    assert sim.carried("out", device) == (out.copies + 1, out.nbytes + 4 * N)
    assert events[0].elapsed_time(events[1]) >= 20.0
    assert events[1].elapsed_time(events[2]) >= 40.0


def test_copies_of_a_direction_take_turns_on_the_link(sim: ModuleType, device: torch.device) -> None:
    accelerator.configure(in_latency_s=0.02)
    hosts = [torch.ones(N, pin_memory=True) for _ in range(3)]
    begin, end = sim.Event(enable_timing=True), sim.Event(enable_timing=True)
    current = sim.current_stream(device)
    begin.record()
    for host in hosts:
        side = sim.Stream(device)
        side.wait_stream(current)
        with sim.stream(side):
            host.to(device, non_blocking=True)
        current.wait_stream(side)
    end.record()
    sim.synchronize(device)
    assert begin.elapsed_time(end) >= 60.0


def test_layouts_and_types_are_changed_on_the_way(sim: ModuleType, device: torch.device) -> None:
    host = torch.arange(24.0).view(4, 6)
    there = torch.zeros(6, 4, dtype=torch.float64, device=device)
    there.copy_(host.t())
    assert torch.equal(there.cpu(), host.t().double())
    back = torch.zeros(4, 12)[:, ::2]
    back.copy_(there.t())
    assert torch.equal(back, host)
    assert torch.equal(there.copy_(torch.arange(4)).cpu(), torch.arange(4).double().expand(6, 4))


def test_threads_that_are_short_of_memory_get_their_own_bytes(sim: ModuleType) -> None:
    """Two threads a device, each with two streams: blocks are split, recorded, awaited and given back all the time."""
    accelerator.configure(limit_bytes=48 * MIB, delay_s=0.0002, seed=1)
    wrong: list[tuple[int, int]] = []
    refused = [0] * 4

    def work(number: int) -> None:
        chance, device = random.Random(number), number % 2
        sim.set_device(device)
        mine, side = sim.Stream(device), sim.Stream(device)
        out: list[tuple[torch.Tensor, torch.Event, float]] = []
        kept: list[torch.Tensor] = []
        for turn in range(100):
            try:
                with sim.stream(mine):
                    x = torch.full((chance.choice([100, 1 << 12, 1 << 18, 1 << 20]),), float(turn), device="sim")
                    y = x * 2 + 1
                side.wait_stream(mine)
                host = torch.empty(y.shape, pin_memory=True)
                with sim.stream(side):
                    host.copy_(y, non_blocking=True)
                y.record_stream(side)
                out.append((host, side.record_event(), 2.0 * turn + 1))
                kept.append(x)
            except torch.OutOfMemoryError:
                refused[number] += 1
                kept.clear()
            x = y = None
            while len(out) > chance.randrange(10):
                host, copied, value = out.pop(0)
                copied.synchronize()
                if host.unique().tolist() != [value]:
                    wrong.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert sum(refused) > 0
