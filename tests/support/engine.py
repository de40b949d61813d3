"""Tools for tests of the engine: engines over a store that a test holds back or breaks, small graphs to save, and the
only look that tests take into an engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compact import PRESETS, Quantized
from io_backends import Buffer, HostStore, PosixStore, Store, StripedStore, TwoLevelStore
from io_backends.testing import Fault, FaultyStore, Operation
from support.exactness import assert_bit_equal
from support.stores import Copying
from tba import OffloadConfig, Offloader, TraceEvent
from tba._engine.saver import Saver

# Whatever is saved becomes smaller, and loses a little.
ALL_INT8 = PRESETS["safe8"].override({"unknown": Quantized("int8")})


def _striped(scratch: Path, threads: int) -> Store:
    stores = [PosixStore(scratch, threads=threads) for _ in range(2)]
    for store in stores:  # both files have their first blocks before a test looks
        memory = torch.zeros(1)
        ticket = store.write(Buffer(memory.data_ptr(), memory.nbytes, memory))
        ticket.wait()
        store.discard(ticket)
    return StripedStore(stores)


def _two_level(scratch: Path, threads: int) -> Store:
    # Host memory for a few small tensors: most are spilled.
    return Copying(TwoLevelStore(HostStore(), PosixStore(scratch, threads=threads), 1 << 16, threads=threads))


# The kinds of store that the engine works over; the fixture `store_kind` gives a test each in turn.
STORES: dict[str, Callable[[Path, int], Store]] = {
    "posix": lambda scratch, threads: PosixStore(scratch, threads=threads),
    "checksum": lambda scratch, threads: PosixStore(scratch, threads=threads, checksum=True),
    "striped": _striped,
    "host": lambda scratch, threads: Copying(HostStore(threads=threads)),
    "two-level": _two_level,
}


@contextmanager
def engine(
    scratch: Path,
    plan: Callable[[Operation, int], Fault | None] | None = None,
    *,
    store_kind: str = "posix",
    store: Store | None = None,
    model: torch.nn.Module | None = None,
    threads: int = 1,
    **settings: Any,
) -> Iterator[Offloader]:
    """An Offloader (tier nvme, everything moves) over a store whose transfers `plan` disturbs; closed at the end."""
    config = OffloadConfig(**({"tier": "nvme", "min_tensor_bytes": 0} | settings))
    store = STORES[store_kind](scratch, config.io_threads or threads) if store is None else store
    if plan is not None:
        store = FaultyStore(store, plan)
    offload = Offloader(model, config, store=store)
    try:
        yield offload
    finally:
        offload.close()


class Gate:
    """A plan that holds back every transfer of one kind until `open()`."""

    def __init__(self, operation: Operation) -> None:
        self._operation = operation
        self._event = threading.Event()

    def __call__(self, operation: Operation, number: int) -> Fault | None:
        return Fault(gate=self._event) if operation == self._operation else None

    def open(self) -> None:
        self._event.set()


class Square(torch.autograd.Function):
    """x -> x^2; saves exactly its input, and only after its own computation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.detach() ** 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradients[0]


def save(x: Tensor) -> Tensor:
    """A graph whose only saved tensor is `x`."""
    result = Square.apply(x)
    assert isinstance(result, Tensor)
    return result


def activation(*size: int, seed: int = 0, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """A leaf and a non-leaf copy of it (the copy's own node saves nothing)."""
    leaf = torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(device).requires_grad_()
    return leaf, leaf + 0


def chain(x: Tensor, length: int = 8) -> Tensor:
    """A graph that saves `length` tensors the size of `x`, none of them a leaf."""
    for _ in range(length):
        x = save(x * 1)
    return x


def chain_gradient(leaf: Tensor, length: int = 8) -> Tensor:
    """The gradient that plain PyTorch gives a leaf of the sum of such a chain."""
    plain = leaf.detach().clone().requires_grad_()
    chain(plain + 0, length).sum().backward()
    assert plain.grad is not None
    return plain.grad


def assert_plain(leaf: Tensor, y: Tensor, length: int = 8) -> None:
    """Backward from the end of a chain gives its leaf the gradient of plain PyTorch, to the last bit."""
    leaf.grad = None
    y.sum().backward()
    assert_bit_equal(leaf.grad, chain_gradient(leaf, length))


def stored_chain(offload: Offloader, *size: int, length: int = 8) -> tuple[Tensor, Tensor]:
    """A leaf and the end of its chain, all of which has been handed to the store."""
    leaf, x = activation(*size)
    with offload:
        y = chain(x, length)
    offload.flush()
    return leaf, y


# -- inside an engine: what neither statistics nor the plan nor the store tells ----------------------------------------


def parts_of(offload: Offloader) -> Saver:
    """The parts of an engine, for a test in which something happens in the midst of one of them."""
    return offload._saver


def waits_for_room(offload: Offloader) -> bool:
    """Whether a thread waits until a write has ended."""
    return bool(offload._saver.mover.staging.waiters)


def in_flight(offload: Offloader) -> tuple[int, int, int]:
    """Writes in flight, their bytes, and the bytes held back from writing."""
    saver = offload._saver
    return saver.mover.staging.count, saver.mover.staging.bytes, saver.ledger.held_bytes


def last_recorded(offload: Offloader) -> tuple[list[TraceEvent], int]:
    """Events of the micro-batch that a page shows, and its number."""
    return offload._saver.recorder.latest()


def reserved_bytes(offload: Offloader) -> tuple[int, int]:
    """Bytes of the budget that are kept free for what a plan moves, and for what it recomputes."""
    expected = offload._saver.ledger.expected
    return expected.sent_bytes, expected.replay_bytes


def watched(offload: Offloader) -> int:
    """Storages that the planner has noted in the step under way."""
    planner = offload._saver.planner
    assert planner is not None
    assert planner.execution._now is not None
    return len(planner.execution._now.saved)


def tear(offload: Offloader) -> None:
    """Leave an engine as an exception does that is not its own, amid a change."""
    offload._saver.left_by(KeyboardInterrupt())
    assert offload._saver.torn


def lock_of(offload: Offloader) -> threading.RLock:
    """The lock of the engine that is in use now."""
    return offload._saver.lock


def give_up_soon(offload: Offloader) -> None:
    """Have ranks that have agreed on a plan wait for each other no longer than a moment."""
    offload._saver.planner._joint._agreement.timeout_s = 0.01
