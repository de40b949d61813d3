"""Check: runs one program plain and through an engine, and finds where the two first differ.

Every instruction must leave the same bits in every tensor and gradient, or raise the same error, up to the first for
which PyTorch itself behaves differently with hooks that do nothing: there plain PyTorch notices an edit, and the engine
may notice it too or already have the bytes stored.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from io_backends.testing import Fault, Operation
from support import gpu
from support.engine import engine
from support.exactness import CPU
from tba import Offloader, OffloadStats, OffloadWarning

from .machine import EDITED, Instruction, Machine, Model, Plain

Plan = Callable[[Operation, int], Fault | None]
Outcome = tuple[Any, ...]  # of one instruction: what it raised, and what all tensors are afterwards
# (faults of the transfers, model, settings) -> an Offloader, closed at the end
MakeEngine = Callable[..., AbstractContextManager[Offloader]]

LOSING = "losing"  # the way whose programs may be told that bytes are lost
# The beginning of an error that says that bytes could not be read back.
LOST = "TransferError"


class Idle(Plain):
    """An arm under hooks that do nothing but remember what they packed."""

    def __init__(self) -> None:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, attrgetter("tensor"))
        self._inside = False
        self.packed: WeakSet[_Box] = WeakSet()

    def __enter__(self) -> None:
        self._hooks.__enter__()
        self._inside = True

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__()
        self._inside = False

    def suspend(self) -> AbstractContextManager[None]:
        return self._outside() if self._inside else nullcontext()

    @contextmanager
    def _outside(self) -> Iterator[None]:
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def _pack(self, tensor: Tensor) -> _Box:
        box = _Box(tensor.detach())
        self.packed.add(box)
        return box


@dataclass(eq=False)
class _Box:
    tensor: Tensor


_INJECTED = Fault(error=OSError(5, "injected"))


def late(operation: Operation, number: int) -> Fault | None:
    """Delay some transfers."""
    return Fault(delay_s=0.002) if number % 3 == 1 else None


def failing(operation: Operation, number: int) -> Fault | None:
    """Fail some writes: their tensors stay in memory."""
    return _INJECTED if operation == "write" and number % 2 else None


def losing(operation: Operation, number: int) -> Fault | None:
    """Fail some reads too: the program gets an error."""
    return _INJECTED if operation == "read" and number % 5 == 2 else failing(operation, number)


# By name: the faults of the transfers, and the settings.
WAYS: dict[str, tuple[Plan | None, dict[str, Any]]] = {
    "all moves": (None, {"prefetch_bytes": 0}),
    "small window": (late, {"prefetch_bytes": 2048, "staging_bytes": 8192, "io_threads": 2}),
    "window": (None, {"prefetch_bytes": 4096, "min_tensor_bytes": 600}),
    "failing": (failing, {"prefetch_bytes": 0, "checksum": True}),
    "held": (None, {}),
    "auto": (None, {"tier": "auto", "memory_budget": 4096}),
    "exact": (None, {"prefetch_bytes": 0, "compress": "exact"}),
    "auto exact": (None, {"tier": "auto", "memory_budget": 4096, "compress": "exact"}),
    "keep exact": (None, {"tier": "keep", "compress": "exact"}),
}
# A tensor of the CPU has no host memory to go to.
ON_DEVICE: dict[str, tuple[Plan | None, dict[str, Any]]] = {
    "host": (None, {"tier": "cpu", "prefetch_bytes": 0}),
    "host window": (late, {"tier": "cpu", "prefetch_bytes": 2048, "staging_bytes": 8192}),
    "host failing": (failing, {"tier": "cpu", "prefetch_bytes": 0}),
    "two links": (None, {"tier": "auto", "memory_budget": 4096, "cpu_budget": 1 << 14}),
}


def ways_of(device: torch.device) -> dict[str, tuple[Plan | None, dict[str, Any]]]:
    """Return the ways of a device, each of which has to leave the bits of plain PyTorch."""
    return WAYS if device.type == "cpu" else WAYS | ON_DEVICE


def maker(device: torch.device, directory: Path) -> MakeEngine:
    """Return what makes the engines of a device, whose files go to a directory."""
    if device.type == "cpu":
        return partial(engine, directory)
    return lambda plan, *, tier="nvme", **settings: gpu.offloader(tier, directory, plan, **settings)


class ShortCollections:
    """Keeps garbage collections short, of which each program asks for some.

    Imported modules stay, and PyTorch goes on importing as it is used; frozen, collections need not look through them.
    """

    def __init__(self) -> None:
        self._modules = 0

    def before_a_program(self) -> None:
        """Freeze what there is, if modules were imported since the last time."""
        if len(sys.modules) != self._modules:
            gc.collect()
            gc.freeze()
            self._modules = len(sys.modules)


def outcomes(program: list[Instruction], machine: Machine) -> list[Outcome]:
    """Run a program on a machine and list the outcome of each step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as errors they would tell arms apart: PyTorch gives many once in a process
        found = machine.run(program)
    machine.finish()
    return found


def through_engine(
    program: list[Instruction], make: MakeEngine, plan: Plan | None, *, device: torch.device = CPU, **chosen: Any
) -> tuple[list[Outcome], OffloadStats]:
    """List the outcomes with an engine, and its statistics once all graphs are gone."""
    model = Model(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OffloadWarning)
        with make(plan, model=model, **chosen) as offload:
            return outcomes(program, Machine(model, offload)), offload.stats()


def through_idle_hooks(program: list[Instruction], device: torch.device = CPU) -> tuple[list[Outcome], int]:
    """List the outcomes under hooks that do nothing, and count the tensors PyTorch keeps once all graphs are gone.

    A backward that failed leaves its queue to the next, a weight that was edited in place holds its graph.
    """
    arm, model = Idle(), Model(device)
    found = outcomes(program, Machine(model, arm))
    return found, len(arm.packed)  # while the model is there, as it is with the engine


def through_plain(program: list[Instruction], device: torch.device = CPU) -> list[Outcome]:
    """List the outcomes in plain PyTorch."""
    return outcomes(program, Machine(Model(device), Plain()))


def compare(
    program: list[Instruction],
    make: MakeEngine,
    plan: Plan | None,
    *,
    device: torch.device = CPU,
    plain: list[Outcome] | None = None,
    records_before: int = 0,
    **chosen: Any,
) -> str:
    """Run a program both ways and describe how they differ, or "".

    Args:
        plain: its outcomes in plain PyTorch, where they are known already.
        records_before: so many of the engine's records are older than the program.
    """
    plain = through_plain(program, device) if plain is None else plain
    ours, stats = through_engine(program, make, plan, device=device, **chosen)
    left = stats.live_records > records_before or (not stats.live_records and stats.resident_bytes > 0)
    if ours == plain and not left:
        return ""
    idle, kept = through_idle_hooks(program, device)
    for number, (wanted, hooked, found) in enumerate(zip(plain, idle, ours, strict=True)):
        if wanted != hooked:
            break
        if EDITED in wanted[0] and found != wanted:
            break  # an operator of a backward saved what the engine gave it, which no edit reaches
        if chosen.get("compress") and EDITED in found[0]:
            break  # what is derived from an edited tensor is refused too
        if plan is losing and found[0].startswith(LOST):
            break
        if found != wanted:
            name = program[number - 1] if number else "enter"
            return f"step {number}, {name}: {difference(wanted, found)}"
    # PyTorch also keeps the last error of an unpack hook, with its frames.
    failed = any(EDITED in told or told.startswith(LOST) for told, *_ in ours)
    return "the graphs are gone, their records are not" if left and not kept and not failed else ""


def difference(wanted: Outcome, found: Outcome) -> str:
    """Describe where two outcomes differ."""
    if wanted[0] != found[0]:
        return f"plain says {wanted[0]!r}, the engine {found[0]!r}"
    return "; ".join(
        f"tensor {place}: {one} in plain, {other}"
        for place, (one, other) in enumerate(zip(wanted[1:], found[1:], strict=False))
        if one != other
    )
