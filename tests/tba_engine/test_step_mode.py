"""Step: what the hooks do in one step, as forwards begin, tensors are saved and the full hooks take over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from torch import Tensor, nn

from support.samples import examples
from tba._auto.course import Entry
from tba._engine.step import (
    COUNTING,
    DEPARTS,
    FOLLOWING,
    FULL,
    LIGHT,
    MOVES,
    OFF,
    RECORDING,
    TURNED,
    Step,
    StepMode,
)
from tba._record.sighting import Chains, Sighting, Sizes, Stays, recognise

SIZES = Sizes(64, 64)
FITTED_BYTES = 3 * 256
STEADY = settings(derandomize=True, database=None, deadline=None, max_examples=examples(100), stateful_step_count=30)


class Own(Tensor):
    """A subclass."""


def _seen(tensor: Tensor, sizes: Sizes = SIZES) -> Stays | Sighting:
    return recognise(tensor, sizes, Chains(), casts=False)


def _note(step: Step, *tensors: Tensor, sizes: Sizes = SIZES) -> None:
    for tensor in tensors:
        step.note(tensor, _seen(tensor, sizes), tensor)


class Steps(RuleBasedStateMachine):
    """Steps after each other, in each of which anything may come at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors = [torch.ones(64) for _ in range(5)]
        self.begin()

    @rule()
    def begin(self) -> None:
        """The step before has ended, or its forward was given up."""
        self.step = Step(0, 0, SIZES, FITTED_BYTES)
        self.expected = FULL
        self.counted: set[int] = set()
        self.passed = 0
        self.entries: list[Entry] = []

    @rule()
    def begin_anew(self) -> None:
        passed_bytes = self.step.passed_bytes
        self.step = self.step.anew()
        assert self.step.passed_bytes == passed_bytes
        self.expected, self.counted, self.passed = FULL, set(), passed_bytes

    def _become(self, mode: StepMode, *before: StepMode, call: Any) -> bool:
        """Make a transition, which is refused unless it starts from one of those before."""
        if self.expected in before:
            call()
            self.expected = mode
            return True
        with pytest.raises(AssertionError):
            call()
        return False

    @rule()
    def rest(self) -> None:
        self._become(OFF, FULL, call=self.step.rest)

    @rule()
    def wake(self) -> None:
        self.step.wake()
        self.expected = FULL if self.expected is OFF else self.expected

    @rule()
    def count(self) -> None:
        self.step.count()
        self.expected = COUNTING if self.expected in (FULL, RECORDING) else self.expected

    @rule()
    def write_down(self) -> None:
        self._become(RECORDING, FULL, call=lambda: self.step.follow("kind", None))

    @rule(moves=strategies.lists(strategies.booleans(), max_size=4))
    def follow(self, moves: list[bool]) -> None:
        entries = [Entry(256, goes, 0 if goes else 256, number, 0) for number, goes in enumerate(moves)]
        if self._become(FOLLOWING, FULL, call=lambda: self.step.follow("kind", entries)):
            self.entries = entries.copy()

    @rule()
    def turn(self) -> None:
        self.step.turn()
        if self.expected in LIGHT:
            self.expected = TURNED
        elif self.expected is RECORDING:
            self.expected = FULL

    @rule(number=strategies.integers(0, 4))
    def save(self, number: int) -> None:
        """A tensor is saved, as the hooks do it."""
        tensor = self.tensors[number]
        if self.expected not in LIGHT:
            if self.expected in (FULL, RECORDING):
                _note(self.step, tensor)
                self.counted.add(number)
            return
        kept_bytes = self.step.kept_bytes(tensor, _seen(tensor))
        if self.expected is COUNTING:
            new = number not in self.counted
            self.counted.add(number)
            assert kept_bytes == (DEPARTS if 256 * len(self.counted) > FITTED_BYTES else 256 * new)
        else:
            entry = self.entries.pop(0) if self.entries else None
            assert kept_bytes == (DEPARTS if entry is None else MOVES if entry.moves else 256)
        self.passed += max(0, kept_bytes)
        if kept_bytes == DEPARTS:
            self.turn()

    @invariant()
    def holds(self) -> None:
        step = self.step
        assert step.mode is self.expected
        assert step.counted_bytes == 256 * len(self.counted)
        assert step.passed_bytes == self.passed
        assert step.is_whole == (step.mode in (FULL, OFF, RECORDING, FOLLOWING) or step.course is not None)
        assert (step.written_down is not None) == (step.mode is RECORDING)


TestSteps = Steps.TestCase
TestSteps.settings = STEADY


def test_memory_is_counted_once_and_weights_never() -> None:
    weight, x = nn.Parameter(torch.ones(8, 8)), torch.ones(8, 8)
    step = Step(0, 0, SIZES, 0)
    _note(step, weight, weight.t(), x, x.t(), x.view(64), torch.ones(4))
    assert step.counted_bytes == x.nbytes
    _note(step, x[4:])  # other memory, by its address
    assert step.counted_bytes == x.nbytes + x[4:].nbytes


@pytest.mark.parametrize("odd", [torch.eye(8).to_sparse(), torch.ones(8).as_subclass(Own)])
def test_what_has_no_memory_of_its_own_ends_counting(odd: Tensor) -> None:
    step = Step(0, 0, SIZES, FITTED_BYTES)
    _note(step, odd)
    step.count()
    assert (step.mode, step.countable) == (FULL, False)
    step = Step(0, 0, SIZES, FITTED_BYTES)
    step.count()
    assert step.kept_bytes(odd, _seen(odd)) == DEPARTS


def test_what_tells_no_memory_is_not_written_down() -> None:
    sizes = Sizes(8, 16)
    x, odd = torch.ones(4), torch.eye(3).to_sparse()
    step = Step(0, 0, sizes, None)
    step.follow("kind", None)
    _note(step, x, sizes=sizes)
    step.note(torch.ones(2), _seen(torch.ones(2), sizes), x)  # small
    assert step.written_down == [Entry(16, False, 0, 0, 0)]
    _note(step, odd, sizes=sizes)
    assert (step.mode, step.written_down) == (FULL, None)


def test_without_a_step_that_fitted_nothing_is_counted_on() -> None:
    step = Step(0, 0, SIZES, None)
    step.count()
    assert step.mode is FULL


@pytest.mark.parametrize("saved", [1, 10, 640, 10_000])
def test_a_step_that_follows_looks_around_at_few_of_what_backward_asks(saved: int) -> None:
    step = Step(0, 0, SIZES, None)
    step.follow("kind", [Entry(256, False, 256, 0, 0)])  # weights have no entry, and are asked for too
    for _ in range(saved):
        next(step.saved)
    step.ask(1)
    looks = [next(step.looks) for _ in range(saved)]
    assert looks[0]
    assert min(saved, 32) <= sum(looks) <= 63
