"""What one thread does with a record while another waits for room to send it."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.engine import Gate, activation, chain, engine, parts_of, waits_for_room
from support.exactness import assert_bit_equal
from tba import OffloadConfig, Offloader

NBYTES = 4096


def _tanh(x: Tensor, length: int) -> Tensor:
    for _ in range(length):
        x = x.tanh()  # no code of a program's own, which would get memory of its own
    return x.sum()


def _plain(length: int) -> Tensor:
    leaf, x = activation(NBYTES // 4)
    return torch.autograd.grad(_tanh(x, length), leaf)[0]


@pytest.mark.parametrize("length", [3, 2, 1])
def test_backward_keeps_what_another_thread_waits_to_send(scratch: Path, length: int) -> None:
    gate = Gate("write")
    with engine(scratch, gate, staging_bytes=NBYTES, prefetch_bytes=length * NBYTES) as offload:
        leaf, x = activation(NBYTES // 4)
        with offload:
            y = _tanh(x, length)  # all of it is held back

        def forward() -> None:
            with offload:
                chain(activation(NBYTES // 4, seed=1)[1], 6)

        other = threading.Thread(target=forward)
        other.start()
        until_s = time.monotonic() + 30
        while not waits_for_room(offload):  # with a record that is neither held nor on its way
            assert time.monotonic() < until_s
            time.sleep(0.001)
        threading.Timer(0.1, gate.open).start()  # backward may have to wait for room as well
        (first,) = torch.autograd.grad(y, leaf, retain_graph=True)
        other.join()
        (second,) = torch.autograd.grad(y, leaf, retain_graph=True)
        offload.flush()
        (third,) = torch.autograd.grad(y, leaf)
        for found in (first, second, third):
            assert_bit_equal(found, _plain(length))
        del y
        assert offload.stats().resident_bytes == 0


def test_what_another_thread_has_brought_meanwhile_counts_once(scratch: Path) -> None:
    with engine(scratch, prefetch_bytes=NBYTES) as offload:
        leaf, x = activation(NBYTES // 4)
        with offload:
            y = chain(x, 6).sum()
        offload.flush()
        read_ahead = parts_of(offload).read_ahead
        make_room = read_ahead._make_room

        def meanwhile(wanted: Any, *others: Any, **named: Any) -> bool:
            read_ahead._make_room = make_room  # type: ignore[method-assign]
            read_ahead._bring(wanted, asked=True)
            return make_room(wanted, *others, **named)

        read_ahead._make_room = meanwhile  # type: ignore[method-assign]
        y.backward()
        assert read_ahead._make_room == make_room
        del y, x
        assert leaf.grad is not None
        assert offload.stats().resident_bytes == read_ahead.nbytes == 0


def test_what_is_asked_for_while_its_write_waits_for_room_stays(scratch: Path) -> None:
    with engine(scratch, prefetch_bytes=NBYTES) as offload:
        leaf, x = activation(NBYTES // 4)
        with offload:
            y = _tanh(x, 1)
        saver = parts_of(offload)
        (record,) = (reference() for reference in saver.read_ahead.records.values())
        assert record is not None
        staging = saver.mover.staging

        def ask(*_: int, **__: bool) -> bool:  # as another thread's backward does, while this one waits
            assert saver.read_ahead.bring(record, -1)
            return True

        staging.has_room, staging.wait_for_room = (lambda *_, **__: False), ask  # type: ignore[method-assign]
        saver.write_behind.send_all()
        del staging.has_room, staging.wait_for_room
        offload.flush()
        (found,) = torch.autograd.grad(y, leaf, retain_graph=True)
        assert_bit_equal(found, _plain(1))
        assert offload.stats().written_bytes == 0


def test_a_step_that_another_thread_ends_meanwhile_is_not_begun_anew(scratch: Path) -> None:
    """A forward begins while another waits for room, which lets go of the lock."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
    offload = Offloader(model, OffloadConfig(storage_paths=scratch, min_tensor_bytes=0, memory_budget=1 << 20))
    with offload:
        model(torch.ones(4, 8))  # nobody wants its gradients
    saver = parts_of(offload)
    packing, pass_on = saver._packing, saver._packing.pass_on

    def meanwhile(step: Any, number: int | None) -> None:
        packing.pass_on = pass_on  # type: ignore[method-assign]
        pass_on(step, number)
        saver.end_step()

    packing.pass_on = meanwhile  # type: ignore[method-assign]
    saver.begin_forward((torch.ones(4, 8),), {})
    assert saver.steps.current.begun_s is None  # a new step, and not the one that has ended
    offload.close()
