"""What a block's call can change is found, wherever it is kept, and put back."""

from __future__ import annotations

import array
import contextvars
import copy
import functools
import gc
import itertools
import pickle
import random
import threading
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from random import uniform
from typing import Any

import numpy as np
import pytest
import torch
from numpy import random as numbers
from torch import Tensor, nn

from tba._state.found import Found
from tba._state.holders import COPIED_BYTES, Generator

COUNTS = {"calls": 0}
TOTAL = 0
VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("VARIABLE", default=0)
NAMES = types.ModuleType("names_of_a_test")
NAMES.__file__ = __file__
NAMES.total = 0  # type: ignore[attr-defined]


class Slotted:
    """Keeps a number in a slot."""

    __slots__ = ("total",)

    def __init__(self) -> None:
        self.total = 0


@dataclass
class Data:
    """Keeps a list."""

    values: list[float]


class Block(nn.Module):
    """Does what it is told with what it keeps."""

    total = 0
    known: dict[str, int] = {}  # noqa: RUF012  # shared by all of the class, which is what is tested

    def __init__(self, do: Callable[[Any], object], kept: Any = None) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.do = do
        self.kept = kept

    def forward(self, x: Tensor) -> Tensor:
        self.do(self)
        return self.linear(x)


def _found(block: nn.Module) -> Found:
    return Found.of(block, block.forward, (torch.zeros(1, 2),), {})


def add_global(_: Block) -> None:
    global TOTAL
    TOTAL += 1


def remember(count: list[int] = [0]) -> None:  # noqa: B006  # a default that keeps state is what is tested
    count[0] += 1


def _closure() -> tuple[Callable[[Any], object], Callable[[], object]]:
    count = 0

    def add(_: Any) -> None:
        nonlocal count
        count += 1

    return add, lambda: count


def _hooked(block: Block) -> Callable[[], object]:
    seen: list[int] = []
    block.linear.register_forward_hook(lambda *_: seen.append(1))
    return lambda: len(seen)


def _grow(kept: Any) -> None:
    kept.total = kept.total + 1


def _write(name: str) -> Callable[[Any], object]:
    return lambda block: setattr(block, name, getattr(block, name) + 1)


def _parent(block: Block) -> Callable[[], object]:
    parent = nn.Module()
    parent.total = 0  # type: ignore[assignment]
    block.parent = weakref.ref(parent)  # type: ignore[assignment]
    block.keeps = [parent]  # type: ignore[assignment]
    return lambda: parent.total


CLOSURE, CLOSED = _closure()
LOCAL = threading.local()
LOCAL.total = 0
Case = tuple[Callable[[Any], object], Any, Callable[[Any], object]]
CASES: dict[str, Case] = {
    "number": (_write("kept"), 0, lambda block: block.kept),
    "list": (lambda block: block.kept.append(1), [], lambda block: list(block.kept)),
    "nested list": (lambda block: block.kept[0][0].append(1), [[[]]], lambda block: len(block.kept[0][0])),
    "dict": (lambda block: block.kept.update(a=2), {"a": 1}, lambda block: dict(block.kept)),
    "ordered dict": (lambda block: block.kept.move_to_end("a"), OrderedDict(a=1, b=2), lambda block: list(block.kept)),
    "default dict": (lambda block: block.kept["a"].append(1), defaultdict(list), lambda block: dict(block.kept)),
    "counter": (lambda block: block.kept.update("a"), Counter(), lambda block: dict(block.kept)),
    "set": (lambda block: block.kept.add(len(block.kept)), {0}, lambda block: set(block.kept)),
    "deque": (lambda block: block.kept.append(1), deque([0, 0], maxlen=2), lambda block: list(block.kept)),
    "slots": (lambda block: _grow(block.kept), Slotted(), lambda block: block.kept.total),
    "dataclass": (lambda block: block.kept.values.append(1.0), Data([]), lambda block: list(block.kept.values)),
    "tensor replaced": (
        lambda block: setattr(block, "kept", block.kept + 1),
        torch.zeros(2),
        lambda block: block.kept.tolist(),
    ),
    "tensor edited": (lambda block: block.kept.add_(1), torch.zeros(2), lambda block: block.kept.tolist()),
    "tensor's data edited": (lambda block: block.kept.data.add_(1), torch.zeros(2), lambda b: b.kept.tolist()),
    "tensor's data replaced": (
        lambda block: setattr(block.kept, "data", torch.ones(3)),
        torch.zeros(2),
        lambda block: block.kept.tolist(),
    ),
    "bytes": (lambda block: block.kept.__setitem__(0, 1), bytearray(2), lambda block: bytes(block.kept)),
    "longer bytes": (lambda block: block.kept.append(1), bytearray(2), lambda block: bytes(block.kept)),
    "longer array": (lambda block: block.kept.append(1), array.array("l", [0]), lambda block: list(block.kept)),
    "array": (lambda block: block.kept.__setitem__(0, 1), array.array("l", [0, 0]), lambda block: list(block.kept)),
    "numpy array": (lambda block: np.add(block.kept, 1, block.kept), np.zeros(2), lambda block: block.kept.tolist()),
    "numpy view": (
        lambda block: np.add(block.kept, 1, block.kept),
        np.zeros((2, 2))[:, 0],
        lambda block: block.kept.tolist(),
    ),
    "random": (lambda block: block.kept.random(), random.Random(0), lambda block: block.kept.getstate()),
    "shared random": (lambda _: random.random(), None, lambda _: random.getstate()),
    "shared numpy random": (
        lambda _: np.random.rand(),
        None,
        lambda _: [*np.random.get_state()[1].tolist(), np.random.get_state()[2]],
    ),
    "shared random, by a method of its own": (lambda _: uniform(0, 1), None, lambda _: random.getstate()),
    "shared random, kept": (lambda block: block.kept(2), random.getrandbits, lambda _: random.getstate()),
    "shared random, by a function within": (
        lambda _: [random.random() for _ in "a"],
        None,
        lambda _: random.getstate(),
    ),
    "shared numpy random, by another name": (lambda _: numbers.rand(), None, lambda _: numbers.get_state()[2]),
    "numpy generator": (
        lambda block: block.kept.random(),
        np.random.default_rng(0),
        lambda block: block.kept.bit_generator.state,
    ),
    "torch generator": (
        lambda block: torch.rand(1, generator=block.kept),
        torch.Generator().manual_seed(0),
        lambda block: block.kept.get_state().tolist(),
    ),
    "class attribute": (
        lambda block: setattr(type(block), "total", block.total + 1),
        None,
        lambda block: type(block).total,
    ),
    "class dict": (lambda block: block.known.update(a=len(block.known)), None, lambda block: dict(block.known)),
    "global": (add_global, None, lambda _: TOTAL),
    "global dict": (lambda _: COUNTS.__setitem__("calls", COUNTS["calls"] + 1), None, lambda _: dict(COUNTS)),
    "another module's": (lambda _: setattr(NAMES, "total", NAMES.total + 1), None, lambda _: NAMES.total),
    "closure": (CLOSURE, None, lambda _: CLOSED()),
    "default": (lambda _: remember(), None, lambda _: list(remember.__defaults__[0])),  # type: ignore[index]
    "partial": (lambda block: block.kept(), functools.partial(remember, [0]), lambda block: list(block.kept.args[0])),
    "context variable": (lambda _: VARIABLE.set(VARIABLE.get() + 1), None, lambda _: VARIABLE.get()),
    "thread's own": (lambda _: setattr(LOCAL, "total", LOCAL.total + 1), None, lambda _: LOCAL.total),
    "parent": (lambda block: _grow(block.parent()), _parent, lambda block: block.seen()),
    "hook of a part": (lambda block: block.linear._forward_hooks, _hooked, lambda block: block.seen()),
    "mode": (lambda block: block.linear.train(not block.linear.training), None, lambda b: b.linear.training),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_call_changes_is_named_and_put_back(name: str) -> None:
    do, kept, look = CASES[name]
    prepare = kept if isinstance(kept, types.FunctionType) else None
    block = Block(do, None if prepare else kept)
    if prepare:
        object.__setattr__(block, "seen", prepare(block))
    x = torch.zeros(1, 2)
    found = Found.of(block, block.forward, (x,), {})
    assert found.unseen == ""
    assert found.block.change() == ""
    before = look(block)
    block(x)
    after = look(block)
    assert before != after
    assert found.block.change()
    with found.as_found():
        assert look(block) == before
        block(x)
        assert look(block) == after
        block(x)
    assert look(block) == after
    assert found.lost() == ""


def test_generators_that_all_code_shares_are_read_where_code_names_them_or_it_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[str] = []
    before = Generator.read
    monkeypatch.setattr(Generator, "read", lambda self: (read.append(self.name), before(self))[1])
    block, args = Block(lambda _: None), (torch.zeros(1, 2),)
    found = Found.of(block, block.forward, args, {})
    block(*args)
    with found.as_found():
        assert (found.block.change(), found.lost(), read) == ("", "", [])
    Found.of(block, block.forward, args, {}, tries=True)
    assert sorted(read) == ["NumPy's random numbers", "Python's random numbers"]


def test_a_given_object_whose_code_draws_repeats_what_it_has_drawn() -> None:
    def draw() -> float:
        return random.random()

    block = Block(lambda _: None)
    found = Found.of(block, block.forward, (torch.zeros(1, 2), draw), {})
    drawn, after = draw(), random.getstate()
    with found.as_found():
        assert draw() == drawn
        draw()
    assert random.getstate() == after


UNSEEN: dict[str, tuple[Callable[[Any], object], Any]] = {
    "an iterator": (lambda block: next(block.kept), iter([1, 2, 3, 4])),
    "a count": (lambda block: next(block.kept), itertools.count()),
    "a generator": (lambda block: next(block.kept), (each for each in range(9))),
    "a count within a list": (lambda block: next(block.kept[0]), [itertools.count()]),
    "globals()": (lambda _: globals().update(TOTAL=1), None),
    "print()": (lambda _: print(), None),
    "sys": (lambda _: __import__("sys").stdout.write(""), None),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_what_cannot_be_read_is_told(name: str) -> None:
    do, kept = UNSEEN[name]
    block = Block(do, kept)
    assert _found(block).unseen


def test_what_nothing_in_a_forward_names_does_not_matter() -> None:
    class Fitted(Block):
        def report(self) -> None:
            print(self.source)

    block = Fitted(lambda _: None)
    block.source = itertools.count()  # type: ignore[assignment]
    assert _found(block).unseen == ""


def test_equal_values_are_no_change() -> None:
    block = Block(lambda block: setattr(block, "kept", (len(block.kept), 0.5 + 0.5, "a" + "b"[:1])), (3, 1.0, "ab"))
    found = _found(block)
    block(torch.zeros(1, 2))
    assert found.block.change() == ""


def test_a_given_object_is_read_anew_at_each_call_and_put_back() -> None:
    block, cache = Block(lambda _: None), Data([])
    for number in range(3):
        found = Found.of(block, block.forward, (torch.zeros(1, 2),), {"cache": cache})
        cache.values.append(1.0)
        assert found.block.change() == ""
        with found.as_found():
            assert len(cache.values) == number
        assert len(cache.values) == number + 1


def test_what_is_new_since_the_last_call_is_found() -> None:
    block = Block(lambda block: block.kept.append(1), [])
    _found(block)
    block.kept = [[]]
    found = _found(block)
    block.kept[0].append(1)
    assert found.block.change()


def test_a_large_tensor_that_is_edited_is_told_as_lost() -> None:
    block = Block(lambda block: block.kept.add_(1), torch.zeros(COPIED_BYTES))
    found = _found(block)
    block(torch.zeros(1, 2))
    assert found.lost() == "kept"


def test_weights_that_are_edited_are_told_as_lost() -> None:
    block = Block(lambda _: None)
    found = _found(block)
    with torch.no_grad():
        block.linear.weight.add_(1)
    assert found.lost() == "its weights"


def test_a_block_is_not_walked_again_because_an_optimizer_has_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    block = Block(lambda _: None)
    earlier = _found(block)
    with torch.no_grad():
        block.linear.weight.add_(1)
    monkeypatch.setattr("tba._state.reach.Reach._visit", None)
    found = _found(block)
    assert (found.lost(), found.block.change()) == ("", "")
    assert earlier.lost() == "its weights"


def test_putting_back_moves_no_version_counter() -> None:
    block = Block(lambda block: block.kept.add_(1), torch.zeros(2))
    found = _found(block)
    block(torch.zeros(1, 2))
    version = block.kept._version
    with found.as_found():
        pass
    assert block.kept._version == version


def test_an_exception_in_the_region_puts_everything_back() -> None:
    block = Block(lambda block: block.kept.append(1), [])
    found = _found(block)
    block(torch.zeros(1, 2))
    with suppress(KeyError), found.as_found():
        block.kept += [1, 2, 3]
        raise KeyError
    assert block.kept == [1]


def test_a_block_that_was_read_dies_with_its_last_reference() -> None:
    block = Block(lambda _: None)
    gc.disable()
    try:
        _found(block)
        alive = [weakref.ref(block), weakref.ref(block.linear), weakref.ref(block.linear.weight)]
        del block
        assert [reference() for reference in alive] == [None] * 3
    finally:
        gc.enable()


def test_a_block_that_holds_its_parent_is_collected_with_it() -> None:
    parent = nn.Module()
    parent.block = block = Block(lambda _: None, [parent])
    _found(block)
    alive = weakref.ref(block)
    del parent, block
    gc.collect()
    assert alive() is None


class Plain(nn.Module):
    """One layer, in a class that can be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def test_copies_of_a_block_that_was_read_carry_nothing() -> None:
    block = Plain()
    before = pickle.dumps(block)
    attributes = set(vars(block))
    _found(block)
    assert set(vars(block)) == attributes
    assert len(pickle.dumps(block)) - len(before) < 200
    for other in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert torch.equal(other(torch.ones(1, 2)), block(torch.ones(1, 2)))
        assert not any(vars(other._forward_hooks).values())
