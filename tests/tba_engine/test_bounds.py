"""Bounds: nothing left behind, memory and disk within their caps, reads in the learned order, forwarding."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from support.engine import Gate, activation, chain, chain_gradient, engine, save, stored_chain, waits_for_room
from support.exactness import assert_bit_equal
from support.models import Looks
from support.stores import once
from tba import offload_context

N = 4096


# Writes, says what is on disk, and waits in mid-step to be killed.
_KILLED = """
import os, sys, torch
from tba import offload_context
offload = offload_context(tier="nvme", min_tensor_bytes=0, prefetch_bytes=0, storage_paths=sys.argv[1])
x = torch.randn(1 << 20, requires_grad=True)
with offload:
    y = (x * 1).exp().exp()
    offload.flush()
    ours = [fd for fd in range(3, 64) if sys.argv[1] in os.path.realpath(f"/proc/self/fd/{fd}")]
    print(offload.stats().file_bytes, *[oct(os.fstat(fd).st_mode & 0o777) for fd in ours], flush=True)
    z = (x * 1).exp().exp()
    sys.stdin.read()
"""


def test_kill_9_in_mid_step_leaves_no_file(scratch: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", _KILLED, str(scratch)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    said = child.stdout.readline().split()
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert int(said[0]) > 0, "nothing was on disk: the test proves nothing"
    assert said[1:] == ["0o600"]
    assert list(scratch.iterdir()) == []


@pytest.mark.sampled(2)
def test_a_thousand_steps_leave_the_file_flat(scratch: Path, store_kind: str) -> None:
    sizes = []
    with engine(scratch, store_kind=store_kind, prefetch_bytes=0) as offload:
        for step in range(1000):
            _, y = stored_chain(offload, 1024 + step % 7, length=3)
            y.sum().backward()
            sizes.append(offload.stats().file_bytes)
        assert offload.stats().written_bytes > 1000 * 4096
        assert offload.stats().live_records == 0
    # The file system counts its own notes of what has been written, some blocks, as part of the file.
    assert max(sizes[500:]) <= max(sizes[:500]) + (1 << 20)


def test_a_closed_offloader_leaves_no_thread_descriptor_or_record(scratch: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    offload = offload_context(tier="nvme", min_tensor_bytes=0, storage_paths=scratch)
    _, y = stored_chain(offload, N)
    assert set(os.listdir("/proc/self/fd")) != before
    y.sum().backward()
    offload.close()
    assert set(os.listdir("/proc/self/fd")) == before
    assert not [t for t in threading.enumerate() if t.name.startswith("tba-")]
    assert offload.stats().live_records == 0


def test_a_written_tensor_leaves_few_objects_for_the_garbage_collector(scratch: Path) -> None:
    """It walks all of them again and again: of a hundred thousand saved tensors they would be what a step takes."""
    count, most = 1000, 6
    x = torch.randn(1024, requires_grad=True)

    def save_all() -> Tensor:
        y = x
        for _ in range(count):
            y = y.sin()
        return y

    with engine(scratch, min_tensor_bytes=0) as offload, offload:
        save_all().sum().backward()
        gc.collect()
        before = len(gc.get_objects())
        y = save_all()
        offload.flush()
        gc.collect()  # tuples that hold only plain values leave its list by and by, from the inside outwards
        gc.collect()
        assert len(gc.get_objects()) - before < (most + 1) * count  # and a few of the step
        y.sum().backward()


def test_writes_in_flight_are_bounded_and_a_slow_disk_holds_forward_back(scratch: Path, store_kind: str) -> None:
    gate = Gate("write")
    cap = 3 * N * 4
    with engine(scratch, gate, store_kind=store_kind, prefetch_bytes=0, staging_bytes=cap) as offload:
        opener = once(lambda: waits_for_room(offload), gate.open)
        _, y = stored_chain(offload, N, length=12)
        stats = offload.stats()
        opener.join()  # flush ended no earlier
        assert 0 < stats.staging_peak_bytes <= cap
        assert stats.backpressure_s > 0
        y.sum().backward()


@pytest.mark.parametrize("lengths", [(16, 16), (6, 16)], ids=["as learned", "longer than learned"])
def test_read_ahead_goes_on_within_its_cap_with_a_slow_consumer(
    lengths: tuple[int, int], scratch: Path, store_kind: str
) -> None:
    cap = 4 * N * 4
    resident: list[int] = []

    def look(*_: Tensor) -> None:
        resident.append(offload.stats().resident_bytes)

    with engine(scratch, store_kind=store_kind, prefetch_bytes=cap) as offload:
        for length in lengths:  # the second time along the learned order
            _, x = activation(N)
            with offload:
                for _ in range(length):
                    y = x * 1
                    x = Looks.apply(y, look, y)
                    del y
            offload.flush()
            x.sum().backward()
        assert max(resident) <= cap
        # Of the second backward the middle: only the first record that is asked for past the learned order's end tells
        # that backward goes on, and at the graph's end nothing is left to read.
        assert min(resident[-8:-2]) > N * 4, "nothing was read ahead"


@pytest.mark.parametrize("flushed", [True, False])
def test_retain_graph_twice_under_a_cap(flushed: bool, scratch: Path, store_kind: str) -> None:
    cap = 3 * N * 4
    with engine(scratch, store_kind=store_kind, prefetch_bytes=cap, staging_bytes=cap) as offload:
        leaf, x = activation(N)
        expected = chain_gradient(leaf, 16)
        with offload:
            y = chain(x, 16)
        if flushed:
            offload.flush()
        for _ in range(3):
            (gradient,) = torch.autograd.grad(y.sum(), leaf, retain_graph=True)
            assert_bit_equal(gradient, expected)
            assert offload.stats().resident_bytes <= cap
        if not flushed:  # what was forwarded from memory at first had to be written after all
            offload.flush()
            assert offload.stats().written_bytes >= 16 * N * 4


def test_forwarding_answers_from_memory_and_cancels_the_queued_write(scratch: Path, store_kind: str) -> None:
    gate = Gate("write")
    with engine(
        scratch, gate, store_kind=store_kind, prefetch_bytes=0
    ) as offload:  # nothing is held back: all is queued, the gate holds the first
        leaf, x = activation(N)
        with offload:
            y = chain(x, 8)
        y.sum().backward()
        assert offload.stats().forwarded_bytes == 8 * N * 4
        assert offload.stats().read_bytes == 0
        gate.open()
        del y, x
        offload.flush()
        assert offload.stats().written_bytes <= 2 * (N * 4 + 1024), "cancelled writes were made"
        assert leaf.grad is not None


def test_reads_follow_the_learned_order_and_survive_a_miss(scratch: Path, store_kind: str) -> None:
    reads: list[int] = []

    def watch(operation: str, number: int) -> None:
        if operation == "read":
            reads.append(number)

    def forward(x: Tensor) -> list[Tensor]:
        return [save(x * (index + 1)) for index in range(6)]

    with engine(scratch, watch, store_kind=store_kind, prefetch_bytes=2 * N * 4) as offload:
        gradients = []
        order = [3, 0, 5, 1, 4, 2]
        for step in range(4):
            leaf, x = activation(N)
            with offload:
                branches = forward(x)
            offload.flush()
            asked = order if step < 3 else order[::-1]
            for index in asked:  # one backward each would be six walks; one sum keeps the graph's own order
                branches[index].sum().backward(retain_graph=True)
            gradients.append(leaf.grad)
            del branches, x
        for gradient in gradients[1:3]:
            assert_bit_equal(gradient, gradients[0])
        assert torch.allclose(gradients[3], gradients[0])
        stats = offload.stats()
        assert stats.read_bytes >= stats.offloaded_bytes


def test_a_learned_order_makes_backward_ask_for_what_is_there_already(scratch: Path, store_kind: str) -> None:
    with engine(scratch, store_kind=store_kind, prefetch_bytes=1 << 30) as offload, offload.trace() as events:
        for _ in range(3):
            _, y = stored_chain(offload, N, length=16)
            events.clear()
            y.sum().backward()
        assert len([e for e in events if e.kind == "read"]) == 16  # each exactly once
