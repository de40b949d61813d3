"""Pairs of hooks entered and left in any order: each acts while it is on and innermost, and nothing stays behind."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from support.engine import engine, save
from support.exactness import assert_bit_equal
from support.planned import nothing
from support.signals import interrupted_at, places
from tba import Offloader, offload_context
from tba._torch import hook_stack, private

BYTES = 64


@pytest.fixture(autouse=True)
def _stack_is_left_empty() -> Iterator[None]:
    yield
    assert private.top_hooks(True) is None


class Theirs(saved_tensors_hooks):
    """A pair that notes which tensors it is given, and stores copies."""

    def __init__(self) -> None:
        self.seen: list[float] = []
        super().__init__(self._pack, lambda packed: packed)

    def _pack(self, tensor: Tensor) -> Tensor:
        self.seen.append(float(tensor.detach()[0]))
        return tensor.detach().clone()


# "enter 0", "leave 0": of their pair 0. "enter ours", "leave ours": of the context. "save": a tensor is saved.
Step = tuple[str, int]


def programs(pairs: int, ours: int) -> st.SearchStrategy[list[Step]]:
    """Programs in which each context is entered and left once, in any order, with saves in between."""

    def in_order(places: list[Any]) -> list[Step]:
        """Each context comes up twice: the first time it is entered."""
        met: set[Any] = set()
        program: list[Step] = []
        for kind, number in places:
            if kind == "save":
                program.append((kind, number))
                continue
            program.append((("leave " if (kind, number) in met else "enter ") + kind, number))
            met.add((kind, number))
        return program

    contexts = [("theirs", number) for number in range(pairs)] + [("ours", number) for number in range(ours)]
    return st.permutations([*contexts * 2, *(("save", number) for number in range(6))]).map(in_order)


def run(program: list[Step], ours: Callable[[int], AbstractContextManager[Any]]) -> tuple[list[list[float]], Tensor]:
    """What each of their pairs sees, and the gradient."""
    leaf = torch.arange(1.0, BYTES / 4 + 1).requires_grad_()
    theirs: dict[int, Theirs] = {}
    contexts: dict[int, AbstractContextManager[Any]] = {}
    loss, marks = torch.zeros(()), 0
    for step, number in program:
        if step == "enter theirs":
            theirs[number] = Theirs()
            theirs[number].__enter__()
        elif step == "leave theirs":
            theirs[number].__exit__()
        elif step == "enter ours":
            contexts[number] = ours(number)
            contexts[number].__enter__()
        elif step == "leave ours":
            contexts[number].__exit__(None, None, None)
        else:
            marks += 1
            loss = loss + save(leaf * float(marks)).sum()
    loss.backward()
    assert leaf.grad is not None
    return [theirs[number].seen for number in sorted(theirs)], leaf.grad


def innermost(program: list[Step], *, engines: int) -> list[Step | None]:
    """Model of the stack: which pair is the innermost at each save. An engine's entry is left that was made last."""
    stack: list[Step] = []
    found: list[Step | None] = []
    for step, number in program:
        if step == "save":
            found.append(stack[-1] if stack else None)
        elif step.startswith("enter"):
            stack.append((step.removeprefix("enter "), number))
        elif step == "leave ours" and engines > 1:
            stack.remove(("ours", number))
        else:  # torch takes off whichever of theirs is innermost
            wanted = step.removeprefix("leave ")
            del stack[max(place for place, (kind, _) in enumerate(stack) if kind == wanted)]
    return found


def assert_as_in_the_model(program: list[Step], seen: list[list[float]], saved_bytes: int, engines: int = 1) -> None:
    asked = innermost(program, engines=engines)
    for number, marks in enumerate(seen):
        assert marks == [mark for mark, pair in enumerate(asked, 1) if pair == ("theirs", number)]
    assert saved_bytes == BYTES * sum(pair is not None and pair[0] == "ours" for pair in asked)


@given(program=programs(pairs=3, ours=2))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_pair_acts_while_it_is_on_and_innermost_in_any_interleaving(scratch: Path, program: list[Step]) -> None:
    wanted = run(program, lambda number: nothing())
    with engine(scratch) as offload:
        offload._saver.steps.told = True  # a program may well save nothing through ours
        found = run(program, lambda number: offload)
        assert private.top_hooks(True) is None
        assert not offload.entered
        assert_as_in_the_model(program, found[0], offload.stats().saved_bytes)
    assert_as_in_the_model([step for step in program if not step[0].endswith("ours")], wanted[0], 0)
    assert_bit_equal(found[1], wanted[1])


@given(program=programs(pairs=2, ours=2))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_pairs_of_two_engines_act_so_too(scratch: Path, program: list[Step]) -> None:
    wanted = run(program, lambda number: nothing())
    with engine(scratch) as one, engine(scratch, compress="exact") as other:
        for offload in (one, other):
            offload._saver.steps.told = True
        found = run(program, lambda number: (one, other)[number])
        assert private.top_hooks(True) is None
        saved_bytes = sum(offload.stats().saved_bytes for offload in (one, other))
        assert_as_in_the_model(program, found[0], saved_bytes, engines=2)
    assert_bit_equal(found[1], wanted[1])


@given(program=programs(pairs=3, ours=1))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nothing_stays_behind_where_torchs_own_function_was_called(scratch: Path, program: list[Step]) -> None:
    """As an extension may, or one that has found it before tba was imported: torch takes off whichever is on top."""
    taken = torch._C._autograd._pop_saved_tensors_default_hooks
    with engine(scratch) as offload, pytest.MonkeyPatch.context() as patched:
        offload._saver.steps.told = True
        patched.setattr(torch._C._autograd, "_pop_saved_tensors_default_hooks", private.pop_hooks)
        balanced = not _left_late(program)
        if balanced:
            run(program, lambda number: offload)
            assert private.top_hooks(True) is None
            assert not offload.entered
    assert torch._C._autograd._pop_saved_tensors_default_hooks is taken


def _left_late(program: list[Step]) -> bool:
    """Whether one of theirs is left when ours has been, and torch's stack would be empty by then."""
    ours_left = False
    for step, _ in program:
        ours_left |= step == "leave ours"
        if step == "leave theirs" and ours_left:
            return True
    return False


def test_somebody_who_takes_off_whatever_is_there_finds_an_empty_stack(scratch: Path) -> None:
    offload: Offloader
    with offload_context(tier="keep") as offload, offload:
        theirs = Theirs()
        theirs.__enter__()
        while private.top_hooks(True) is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        save(torch.ones(16, requires_grad=True) * 1)
    assert (theirs.seen, offload.stats().saved_bytes) == ([], 0)
    offload.close()


def test_an_interrupt_outside_leaves_no_hooks_of_others() -> None:
    def program() -> None:
        with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, Tensor.detach):
            torch.ones(1, requires_grad=True).sin()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        found = places(program, (hook_stack.__file__,))
        later = [place for place in found if not place.is_first]  # as it begins, PyTorch's own leaves them too
        assert later
        for place in later:
            assert interrupted_at(place, program)
            assert private.top_hooks(True) is None
    finally:
        signal.signal(signal.SIGINT, before)
        while private.top_hooks(True) is not None:
            private.pop_hooks()
