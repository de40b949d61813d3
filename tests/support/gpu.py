"""What the GPU tests share: engines for each tier, networks with work that starts late, and the fixture `device`.

The device is a CUDA device where there is one. With DEVICE=simulated in the environment it is the accelerator made of a
CPU (`support.accelerator`), in a process that has loaded it: `make accelerator`. Tests that take the fixture `device`
run on the CPU in `make test`, and on the device in `make accelerator` and `make gpu`.

Everything is made anew in each test and sized for seconds. cuBLAS reads its workspace from the environment when it is
first used, so importing this module sets it: results are then the same to the bit from run to run.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from io_backends import HostStore, PosixStore, Store
from io_backends.testing import Fault, FaultyStore, Operation
from support import accelerator
from support.exactness import CPU, Run
from tba import OffloadConfig, Offloader

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")

SIMULATED = os.environ.get("DEVICE") == "simulated"
WHY_NOT = ""
if SIMULATED:
    WHY_NOT = accelerator.why_not() or ""
elif not torch.cuda.is_available():
    WHY_NOT = "torch.cuda.is_available() is False: no CUDA device"
# PyTorch's module of the device, with what CUDA's has.
card: Any = accelerator.load() if SIMULATED and not WHY_NOT else torch.cuda
DEVICE = torch.device("sim" if SIMULATED else "cuda", 0)
MIB = 1 << 20
ELEMENTS = 1 << 18
NBYTES = 4 * ELEMENTS  # of one saved tensor, where a test does not say otherwise

# A test that cannot be decided here says so; one that promises a device (`make gpu`) shows the reason at its end.
gpu_only = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
    # Other libraries' warnings differ from machine to machine; ours are errors where they are not expected.
    pytest.mark.filterwarnings("default", "error::tba.OffloadWarning"),
]

# Where the tests run that take the fixture `device`.
DEVICES = [] if SIMULATED else [pytest.param(CPU, id="cpu")]
if not WHY_NOT:
    DEVICES.append(pytest.param(DEVICE, id=DEVICE.type, marks=gpu_only))


def tiers_of(device: torch.device) -> tuple[str, ...]:
    """The tiers to which tensors of a device move."""
    return ("nvme",) if device.type == "cpu" else ("nvme", "cpu")


@cache
def open_device() -> None:
    """Load the libraries, so that threads and files they keep are there before a test looks for its own."""
    x = torch.ones(8, 8, 8, 8, device=DEVICE, requires_grad=True)
    torch.nn.functional.conv2d(x, x).sum().backward()
    (x[0, 0] @ x[0, 0]).sum().backward()
    torch.empty(8, pin_memory=True)
    card.synchronize()


@contextmanager
def deterministic() -> Iterator[None]:
    """Only kernels that give the same bits in every run; fresh memory is filled with NaN, so nothing works by luck."""
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]


@contextmanager
def offloader(
    tier: str,
    scratch: Path,
    plan: Callable[[Operation, int], Fault | None] | None = None,
    *,
    model: nn.Module | None = None,
    **settings: Any,
) -> Iterator[Offloader]:
    """An engine that moves everything (tier "auto" by a budget of nothing); `plan` disturbs the store's transfers."""
    fixed: dict[str, Any] = {"tier": tier, "min_tensor_bytes": 0, "storage_paths": scratch}
    if tier == "auto":
        fixed["memory_budget"] = 0
    config = OffloadConfig(**(fixed | settings))
    store: Store | None = None
    if plan is not None:
        files = PosixStore(scratch, threads=config.io_threads or 2)
        store = FaultyStore(HostStore() if tier == "cpu" else files, plan)
    offload = Offloader(model, config, store=store)
    try:
        yield offload
    finally:
        offload.close()


def plainly(train: Callable[[], Run], device: torch.device) -> Run:
    """What plain training gives. On a card it is run twice: where the bits differ, nothing can be compared with it."""
    if device.type == "cpu":
        return train()
    try:
        plain = train()
        train().assert_equals(plain)
    except AssertionError as difference:
        pytest.skip(f"plain training is not reproducible here: {difference}")
    except RuntimeError as refusal:
        if "deterministic" not in str(refusal):
            raise
        pytest.skip(f"an operator has no deterministic kernel: {refusal}")
    return plain


def leaf_of(seed: int = 0, elements: int = ELEMENTS) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed)).to(DEVICE).requires_grad_()


def take_what_is_free(device: torch.device) -> None:
    """Write to memory that has come free, which else may still have what was in it."""
    for _ in range(4):
        torch.full((1 << 20,), float("nan"), device=device)


def no_sleep() -> None:
    """In place of `Delays.sleep` where nothing is to be late."""


class LateCosine(torch.autograd.Function):
    """x -> sin(cos(x)). Saves what it was given and what it made; both its kernels start late."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sleep: Callable[[], None]) -> Tensor:
        sleep()
        inner = x.cos()
        ctx.save_for_backward(x, inner)
        ctx.sleep = sleep
        return inner.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        x, inner = ctx.saved_tensors
        ctx.sleep()
        return gradients[0] * inner.cos() * -x.sin(), None


def scribble(like: Tensor) -> None:
    """What later operators do: take memory that has come free on this stream, and write to it."""
    for _ in range(3):
        torch.full_like(like, float("nan"))


def late_net(x: Tensor, layers: int, sleep: Callable[[], None] = no_sleep) -> Tensor:
    """Saves two tensors the size of `x` a layer, and lets others into all memory that is freed meanwhile."""
    for _ in range(layers):
        result = LateCosine.apply(x * 1.01, sleep)
        assert isinstance(result, Tensor)
        x = result
        scribble(x)
    return x


def crossing_net(x: Tensor, layers: int, other: Any, sleep: Callable[[], None] = no_sleep) -> Tensor:
    """Saves one tensor a layer on this stream and on another, both of which read it in backward too."""
    here = card.current_stream()
    for _ in range(layers):
        shared = x * 1.01
        shared.record_stream(other)  # whose backward reads it there
        other.wait_stream(here)
        with card.stream(other):
            one = LateCosine.apply(shared, sleep)
        two = LateCosine.apply(shared, sleep)
        del shared
        scribble(x)
        here.wait_stream(other)
        x = one + two
        one.record_stream(here)
    return x


class Delays:
    """Work of random length, ahead of whatever is queued next: what depends on luck in timing then fails.

    `sleep` is for operators to call; while installed, every copy of the engine's side streams starts late as well, and
    so does every transfer of the store that has `plan`.
    """

    MAX_CYCLES = 1_000_000  # half a millisecond at 2 GHz: some twenty times a kernel or a copy of these tests

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._chance = random.Random(seed)
        self.copies = 0
        streams = sys.modules["tba._device.streams"]  # the one seam through which every copy gets its stream
        real = streams._side_stream

        def late(device: torch.device, direction: str) -> Any:
            stream = real(device, direction)
            with card.stream(stream):
                self.sleep()
            self.copies += 1
            return stream

        monkeypatch.setattr(streams, "_side_stream", late)

    def sleep(self) -> None:
        card._sleep(self._chance.randrange(self.MAX_CYCLES))

    def plan(self, operation: Operation, number: int) -> Fault | None:
        return Fault(delay_s=self._chance.random() * 1e-3)
