"""Closing in the middle: writes that the engine itself calls off are no failure of the disk, whatever has raised."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from io_backends import Store
from io_backends.testing import Fault, FaultyStore, Operation
from support.engine import STORES, activation, chain, engine, save
from support.exactness import assert_bit_equal
from support.models import RMSNorm
from support.stores import once
from tba import OffloadWarning, offload_context

N = 1 << 15
LENGTH = 8


class Failed(Exception):
    """What a training raises."""


def fail_in_forward(graphs: list[Tensor], x: Tensor) -> None:
    graphs.append(chain(x, LENGTH))
    raise Failed


def _fail(_: Tensor) -> None:
    raise Failed


def fail_in_backward(graphs: list[Tensor], x: Tensor) -> None:
    graphs.append(chain(x, LENGTH))
    broken = graphs[0].view_as(graphs[0])
    broken.register_hook(_fail)
    broken.sum().backward()


class Held(FaultyStore):
    """A store whose first two writes end after it has begun to close, so that all others are still queued then.

    Two: of a striped store, each of the two files gets one.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(store, self._plan)
        self._closing = threading.Event()

    def _plan(self, operation: Operation, number: int) -> Fault | None:
        return Fault(gate=self._closing) if operation == "write" and number < 2 else None

    def close(self) -> None:
        self.abandon()  # does not wait for the writes
        self._closing.set()
        super().close()


@pytest.mark.parametrize("fail", [fail_in_forward, fail_in_backward])
def test_writes_called_off_after_an_exception_are_no_failures(
    fail: Callable[[list[Tensor], Tensor], None], scratch: Path, store_kind: str
) -> None:
    _, x = activation(N)
    graphs: list[Tensor] = []  # a traceback keeps them, too
    with engine(scratch, store=Held(STORES[store_kind](scratch, 1)), prefetch_bytes=0) as offload:
        with pytest.raises(Failed), offload:
            fail(graphs, x)
        offload.close()
        stats = offload.stats()
    assert stats.errors == 0
    assert 0 < stats.kept_by_reason["closed"] <= LENGTH * N * 4
    assert stats.saved_bytes == stats.weight_bytes + stats.duplicate_bytes + stats.kept_bytes + stats.offloaded_bytes


def test_what_was_called_off_is_still_in_memory(scratch: Path) -> None:
    leaf, x = activation(N)
    with engine(scratch, store=Held(STORES["posix"](scratch, 1)), prefetch_bytes=0) as offload:
        with offload:
            y, z = save(x * 1), save(x * 1)
        offload.close()
        z.sum().backward()
        assert_bit_equal(leaf.grad, 2 * leaf.detach())
        assert offload.stats().errors == 0
        del y


class _Awaited(threading.Event):
    """An event that tells when somebody waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.awaited = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.awaited.set()
        return super().wait(timeout)


def test_a_write_that_fails_while_closing_is_still_told(scratch: Path) -> None:
    def plan(operation: Operation, number: int) -> Fault | None:
        return Fault(gate=go_on, error=OSError(28, "No space left on device")) if operation == "write" else None

    go_on = _Awaited()
    with engine(scratch, plan, prefetch_bytes=0) as offload:
        _, x = activation(N)
        with offload:
            y = save(x)
        assert go_on.awaited.wait(60)  # a write that no worker has begun is called off

        def close() -> None:
            opener = once(lambda: offload.closed, go_on.set)  # where the warning is looked for
            offload.close()
            opener.join()

        with pytest.warns(OffloadWarning, match=r"failed.*No space left.*stays in memory"):
            close()
        assert offload.stats().errors == 1
        del y


def test_a_closed_offloader_leaves_no_hook_on_the_model(scratch: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), RMSNorm(64), nn.Linear(64, 64))

    def hooks() -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())

    offload = offload_context(model, tier="nvme", storage_paths=scratch, min_tensor_bytes=0, compress="safe8")
    with offload:
        loss = model(torch.randn(64, 64)).sum()
    assert hooks() == 2
    loss.backward()
    offload.close()
    assert not hooks()
