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
