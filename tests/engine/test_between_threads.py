"""What one thread does with a record while another waits for room to send it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from support.engine import Gate, activation, chain, engine, waits_for_room
from support.exactness import assert_bit_equal

NBYTES = 4096


def _tanh(x: Tensor, length: int) -> Tensor:
    for _ in range(length):
        x = x.tanh()  # no code of a program's own, which would get memory of its own
    return x.sum()


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
        plain_leaf, plain = activation(NBYTES // 4)
        (expected,) = torch.autograd.grad(_tanh(plain, length), plain_leaf)
        for found in (first, second, third):
            assert_bit_equal(found, expected)
        del y
        assert offload.stats().resident_bytes == 0
