"""Streams, events, captures and several devices: as PyTorch's interface for CUDA has them."""

from __future__ import annotations

import threading
from types import ModuleType

import pytest
import torch

from support import accelerator

N = 1 << 16


def test_an_event_is_passed_when_its_stream_has_come_there(sim: ModuleType, device: torch.device) -> None:
    stream = sim.Stream(device)
    early, late = sim.Event(), sim.Event(blocking=True)
    early.record(stream)
    early.synchronize()
    with sim.held(stream):
        late.record(stream)
        assert early.query()
        assert not late.query()
        assert not stream.query()
    late.synchronize()
    assert late.query()
    stream.synchronize()
    assert stream.query()


def test_a_stream_waited_for_is_idle(sim: ModuleType, device: torch.device) -> None:
    stream, event = sim.Stream(device), sim.Event()
    for _ in range(50000):
        event.record(stream)
        stream.synchronize()
        assert stream.query()


def test_an_event_recorded_again_leaves_earlier_waits_alone(sim: ModuleType, device: torch.device) -> None:
    first, second, waiting = sim.Stream(device), sim.Stream(device), sim.Stream(device)
    event = sim.Event()
    event.record(first)
    waiting.wait_event(event)
    with sim.held(second):
        event.record(second)
        waiting.synchronize()
        assert not event.query()


def test_events_tell_the_time_between_them(sim: ModuleType, device: torch.device) -> None:
    accelerator.configure(out_latency_s=0.02)
    begin, end = sim.Event(enable_timing=True), sim.Event(enable_timing=True)
    host = torch.empty(N, pin_memory=True)
    source = torch.ones(N, device=device)
    begin.record()
    host.copy_(source, non_blocking=True)
    end.record()
    end.synchronize()
    assert begin.elapsed_time(end) >= 20.0


def test_events_without_timing_tell_no_time(sim: ModuleType) -> None:
    begin, end = sim.Event(), sim.Event()
    begin.record()
    end.record()
    end.synchronize()
    with pytest.raises(RuntimeError, match="enable_timing=True"):
        begin.elapsed_time(end)


def test_an_event_ahead_of_the_device_tells_no_time(sim: ModuleType, device: torch.device) -> None:
    begin, end = sim.Event(enable_timing=True), sim.Event(enable_timing=True)
    begin.record()
    with sim.held(sim.current_stream(device)):
        end.record()
        with pytest.raises(RuntimeError, match="not ready"):
            begin.elapsed_time(end)


def test_a_thread_has_a_current_stream_of_its_own(sim: ModuleType, device: torch.device) -> None:
    seen = []
    side = sim.Stream(device)
    with sim.stream(side):
        thread = threading.Thread(target=lambda: seen.append(sim.current_stream(device)))
        thread.start()
        thread.join()
        assert sim.current_stream(device) == side
    assert seen == [sim.default_stream(device)]
    assert sim.current_stream(device) == sim.default_stream(device)


def test_two_devices_have_streams_and_memory_of_their_own(sim: ModuleType) -> None:
    assert torch.accelerator.device_count() == 2
    with sim.device(1):
        other = torch.ones(N, device="sim")
        assert sim.current_device() == 1
    assert other.device == torch.device("sim", 1)
    assert sim.current_device() == 0
    here, there = sim.memory_allocated(0), sim.memory_allocated(1)
    with sim.held(sim.current_stream(1)):
        doubled = other * 2
        assert not sim.current_stream(1).query()
        assert sim.current_stream(0).query()
    assert (sim.memory_allocated(0), sim.memory_allocated(1)) == (here, there + 4 * N)
    assert doubled.unique().tolist() == [2.0]


def test_an_error_of_a_kernel_is_told_at_the_next_wait(sim: ModuleType, device: torch.device) -> None:
    table = torch.ones(4, 4, device=device)
    picked = table.index_select(0, torch.tensor([9], device=device))
    with pytest.raises(RuntimeError, match="work queued earlier has failed"):
        sim.synchronize(device)
    sim.synchronize(device)
    assert picked.shape == (1, 4)


def test_a_capture_forbids_what_the_host_may_not_do(sim: ModuleType, device: torch.device) -> None:
    made = torch.ones(N, device=device)
    before = sim.Event()
    before.record()
    inside = sim.Event()
    with sim.graph(sim.CUDAGraph()):
        stream = sim.current_stream(device)
        inside.record()
        assert sim.is_current_stream_capturing()
        assert stream.is_capturing()
        for forbidden in (before.query, before.synchronize, stream.query, sim.synchronize, made.sum().item, made.cpu):
            with pytest.raises(torch.AcceleratorError, match="capturing"):
                forbidden()
        with pytest.raises(torch.AcceleratorError, match="outside of the capture"):
            stream.wait_event(before)
    assert not sim.is_current_stream_capturing()
    assert before.query()
    for forbidden in (inside.query, inside.synchronize, inside.wait):
        with pytest.raises(torch.AcceleratorError, match="last recorded in a capturing stream"):
            forbidden()


def test_a_graph_runs_what_was_captured_whenever_replayed(sim: ModuleType, device: torch.device) -> None:
    x = torch.ones(N, device=device)
    graph = sim.CUDAGraph()
    with sim.graph(graph):
        y = x * 2
        z = y + 1
    assert len(graph) == 2
    sim.synchronize(device)
    assert int(z.isnan().sum()) == N  # nothing has run
    for value in (3.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert z.unique().tolist() == [2 * value + 1]


def test_waits_of_operators_may_be_forbidden(sim: ModuleType, device: torch.device) -> None:
    x = torch.ones(N, device=device)
    host = torch.empty(N, pin_memory=True)
    sim.set_sync_debug_mode("error")
    try:
        for waits in (x.sum().item, x.cpu, x.nonzero, lambda: x.copy_(host)):
            with pytest.raises(RuntimeError, match="synchronizing operation"):
                waits()
        host.copy_(x, non_blocking=True)
        x.copy_(host, non_blocking=True)
    finally:
        sim.set_sync_debug_mode("default")
    assert x.unique().tolist() == [1.0]
