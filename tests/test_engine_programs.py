"""The engine against plain PyTorch over programs that hypothesis thinks of: views, edits, hooks, graphs kept, dropped.

Every instruction must leave the same bits in every tensor and gradient, or raise the same, up to the first for which
PyTorch itself does other things than with hooks that do nothing: there plain PyTorch notices an edit, and the engine
may notice it too or have the bytes in safety.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from engine_tools import ALL_INT8, engine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from programs import EDITED, NAMES, Instruction, Machine, Model, Plain
from torch import Tensor

from io_backends.testing import Fault, Operation
from tba import Offloader, OffloadStats, OffloadWarning

NUMBERS = st.integers(0, 255)
PROGRAMS = st.lists(st.tuples(st.sampled_from(NAMES), NUMBERS, NUMBERS, NUMBERS), min_size=4, max_size=40)


class Idle(Plain):
    """Hooks that do nothing but to know what they packed."""

    def __init__(self) -> None:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, attrgetter("tensor"))
        self._inside = False
        self.packed: WeakSet[_Box] = WeakSet()

    def enter(self) -> None:
        self._hooks.__enter__()
        self._inside = True

    def leave(self) -> None:
        self._hooks.__exit__()
        self._inside = False

    @contextmanager
    def suspend(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self._inside:
                self.leave()
                stack.callback(self.enter)
            yield

    def _pack(self, tensor: Tensor) -> _Box:
        box = _Box(tensor.detach())
        self.packed.add(box)
        return box


@dataclass(eq=False)
class _Box:
    tensor: Tensor


class Engine(Plain):
    """The arm with an engine."""

    def __init__(self, offload: Offloader) -> None:
        self.offload = offload

    def enter(self) -> None:
        self.offload.__enter__()

    def leave(self) -> None:
        self.offload.__exit__(None, None, None)

    def flush(self) -> None:
        self.offload.flush()

    def suspend(self) -> AbstractContextManager[None]:
        return self.offload.suspend()


def outcomes(program: list[Instruction], machine: Machine) -> list[tuple[Any, ...]]:
    """What each step left."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as errors they would tell arms apart: PyTorch gives many once in a process
        found = [machine.step(instruction) for instruction in [("context", 0, 0, 0), *program]]
    machine.finish()
    return found


def through_engine(
    program: list[Instruction], scratch: Path, plan: Any, **chosen: Any
) -> tuple[list[tuple[Any, ...]], OffloadStats]:
    """The same with an engine, and its statistics when all graphs are gone."""
    model = Model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OffloadWarning)
        with engine(scratch, plan, model=model, **chosen) as offload:
            return outcomes(program, Machine(model, Engine(offload))), offload.stats()


def compare(program: list[Instruction], scratch: Path, plan: Any, **chosen: Any) -> None:
    """Run a program both ways."""
    plain = outcomes(program, Machine(Model(), Plain()))
    idle = outcomes(program, Machine(Model(), nothing := Idle()))
    kept = len(nothing.packed)  # by PyTorch: a backward that failed leaves its queue to the next
    ours, stats = through_engine(program, scratch, plan, **chosen)
    for number, (wanted, hooked, found) in enumerate(zip(plain, idle, ours, strict=True)):
        if wanted != hooked:
            break
        if EDITED in wanted[0] and found != wanted:
            break  # an operator of a backward saved what the engine gave it, which no edit reaches
        if chosen.get("compress") and EDITED in found[0]:
            break  # what is derived from an edited tensor is refused too
        name = program[number - 1] if number else "enter"
        assert found == wanted, f"step {number}, {name}: {_difference(wanted, found)}"
    # PyTorch also keeps the last error of an unpack hook, with its frames.
    if not kept and not any(EDITED in told for told, *_ in ours):
        assert (stats.live_records, stats.resident_bytes) == (0, 0), "the graphs are gone, their records are not"


def _difference(wanted: tuple[Any, ...], found: tuple[Any, ...]) -> str:
    if wanted[0] != found[0]:
        return f"plain says {wanted[0]!r}, the engine {found[0]!r}"
    return "; ".join(
        f"tensor {place}: {one} in plain, {other}"
        for place, (one, other) in enumerate(zip(wanted[1:], found[1:], strict=False))
        if one != other
    )


def late(operation: Operation, number: int) -> Fault | None:
    """Some transfers take their time."""
    return Fault(delay_s=0.002) if number % 3 == 1 else None


def failing(operation: Operation, number: int) -> Fault | None:
    """Some writes fail: their tensors stay."""
    return Fault(error=OSError(5, "injected")) if operation == "write" and number % 2 else None


WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "all moves": (None, {"prefetch_bytes": 0}),
    "small window": (late, {"prefetch_bytes": 2048, "staging_bytes": 8192, "threads": 2}),
    "window": (None, {"prefetch_bytes": 4096, "min_tensor_bytes": 600}),
    "failing": (failing, {"prefetch_bytes": 0, "checksum": True}),
    "held": (None, {}),
    "auto": (None, {"tier": "auto", "memory_budget": 4096}),
    "exact": (None, {"prefetch_bytes": 0, "compress": "exact"}),
    "keep exact": (None, {"tier": "keep", "compress": "exact"}),
}


SOME = settings(
    derandomize=True,
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.parametrize("way", WAYS)
@SOME
@given(program=PROGRAMS)
def test_programs_leave_the_same_bits(scratch: Path, way: str, program: list[Instruction]) -> None:
    plan, chosen = WAYS[way]
    compare(program, scratch, plan, **chosen)


@pytest.mark.parametrize("way", ["all moves", "small window", "failing", "auto"])
@SOME
@given(program=PROGRAMS)
def test_what_is_lost_does_not_depend_on_tier_or_timing(scratch: Path, way: str, program: list[Instruction]) -> None:
    plan, chosen = WAYS[way]
    kept, there = through_engine(program, scratch, None, tier="keep", compress=ALL_INT8)
    moved, here = through_engine(program, scratch, plan, **chosen, compress=ALL_INT8)
    for number, (wanted, found) in enumerate(zip(kept, moved, strict=True)):
        if EDITED in wanted[0] and found != wanted:
            return  # bytes that had moved are safe from an edit
        assert found == wanted, f"step {number}: {_difference(wanted, found)}"
    if any(name in ("inplace", "edit_grad") for name, *_ in program):
        return  # an edit of a tensor that is being written leaves nothing that others could be derived from
    assert (here.encoded_bytes, here.packed_bytes, here.derived_bytes) == (
        there.encoded_bytes,
        there.packed_bytes,
        there.derived_bytes,
    )
