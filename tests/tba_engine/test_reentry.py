"""Re-entry: what comes in while a hook runs (a finaliser, a trace function) changes nothing; what breaks a hook off is
told, and the next entry has an engine that is whole."""

from __future__ import annotations

import gc
import signal
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tba
from io_backends import interrupts
from support.engine import chain, engine, lock_of, tear
from support.exactness import assert_bit_equal
from support.interrupts import Interrupt
from support.repeated import ENGINE, SCARCE, Repeated, repeated
from support.signals import Place, at, places
from tba import ClosedError, OffloadConfig, Offloader

SETTINGS: dict[str, dict[str, Any]] = {
    "nvme": SCARCE,
    "auto": {"tier": "auto", "memory_budget": 1 << 14},
    "attached": SCARCE | {"attached": True},
    "exact": {"tier": "nvme", "compress": "exact", "prefetch_bytes": 0},
}


@pytest.fixture(params=SETTINGS)
def bench(request: pytest.FixtureRequest, scratch: Path) -> Iterator[Repeated]:
    with repeated(scratch, **SETTINGS[request.param]) as made:
        yield made


class Other:
    """Another model, to be trained wherever it happens, and a graph of it that was made before."""

    def __init__(self, offload: Offloader) -> None:
        self.model = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12))
        self.x = torch.randn(6, 12)
        self.offload = offload
        self.expected = self._gradients(self.model(self.x).square().sum())
        self.older: Tensor | None = None
        self.trained = 0

    def _gradients(self, loss: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss, list(self.model.parameters()), retain_graph=True))

    def leave_a_graph(self) -> None:
        """Make a graph whose tensors the engine has stored."""
        with self.offload:
            self.older = self.model(self.x).square().sum()
        self.offload.flush()

    def train(self) -> None:
        """Under hooks as they are, in a context entered anew, and from the older graph."""
        with torch.enable_grad():
            found = [self._gradients(self.model(self.x).square().sum())]
            with self.offload:
                found.append(self._gradients(self.model(self.x).square().sum()))
            if self.older is not None:
                found.append(self._gradients(self.older))
        for each in found:
            assert_bit_equal(each, self.expected)
        self.offload.stats()
        self.trained += 1


class _Cycle:
    def __init__(self) -> None:
        self.me = self


def _collects(call: Callable[[], None], errors: list[BaseException]) -> None:
    """Have a garbage collection run a finaliser that calls it."""

    def final() -> None:
        try:
            call()
        except BaseException as error:  # the interpreter would only print it
            errors.append(error)

    weakref.finalize(_Cycle(), final)
    gc.collect()


def _sample(found: list[Place], every: int) -> list[Place]:
    assert len(found) > 150
    return found[::every]


@pytest.mark.parametrize("how", ["finaliser", "trace function"])
@pytest.mark.parametrize("every", [37, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.exhaustive])])
def test_what_trains_in_the_midst_of_a_hook_is_exact_and_changes_nothing(how: str, every: int, bench: Repeated) -> None:
    other, errors = Other(bench.offload), list[BaseException]()
    trains = other.train if how == "trace function" else lambda: _collects(other.train, errors)
    for place in _sample(places(bench.step, ENGINE), every):
        other.leave_a_graph()
        before = other.trained
        at(place, bench.step, trains)
        bench.check_gradients()
        other.older = None
        assert not errors, f"at {place}: {errors}"
        assert other.trained <= before + 1
        bench.check()
    assert other.trained > 5


@pytest.mark.parametrize("kind", [Interrupt, RuntimeError, OSError])
@pytest.mark.parametrize("every", [37, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.exhaustive])])
def test_an_error_of_a_trace_function_reaches_the_program_and_the_next_step_is_exact(
    kind: type[BaseException], every: int, bench: Repeated
) -> None:
    raised = [place for place in _sample(places(bench.step, ENGINE), every) if not _begins_the_end(place)]
    reached = 0
    for place in raised:
        error = kind("by a trace function")

        def fail(error: BaseException = error) -> None:
            raise error

        happened = True
        try:
            happened = at(place, bench.step, fail)
        except kind as caught:
            same = caught is error
            caught.with_traceback(None)  # its frames have the step's graph
        else:
            same = not happened
        assert same, f"swallowed at {place}"
        reached += happened
        try:
            bench.check()
        except BaseException as after:
            after.add_note(f"after an error at {place}")
            raise
    assert reached > 3


def _begins_the_end(place: Place) -> bool:
    """Whether what leaves the context has not begun yet: torch's own contexts stay entered by that too."""
    return place.code in (Offloader.__exit__.__code__, Offloader._leave.__code__) and place.is_first


@pytest.mark.parametrize("flushed", [True, False], ids=["file", "memory"])
@pytest.mark.parametrize("compress", [None, "exact"])
def test_what_a_torn_engine_has_comes_back_from_memory_and_from_the_file(
    flushed: bool, compress: str | None, scratch: Path
) -> None:
    leaf = torch.randn(4096, requires_grad=True)
    expected = torch.autograd.grad(chain(leaf.relu(), 4).sum(), leaf)
    settings: dict[str, Any] = {"prefetch_bytes": 0} if flushed else {}
    with engine(scratch, compress=compress, **settings) as offload:
        with offload:
            loss = chain(leaf.relu(), 4).sum()
        if flushed:
            offload.flush()
            assert offload.stats().written_bytes > 0
        saved_bytes = offload.stats().saved_bytes
        tear(offload)
        with offload:
            other = chain(leaf.relu(), 4).sum()
        assert offload.stats().saved_bytes == 2 * saved_bytes > 0
        for each in (loss, other):
            assert_bit_equal(torch.autograd.grad(each, leaf, retain_graph=True), expected)


def test_closing_ends_a_torn_engine_too(scratch: Path) -> None:
    leaf = torch.randn(4096, requires_grad=True)
    with engine(scratch, prefetch_bytes=0) as offload:
        with offload:
            loss = chain(leaf, 4).sum()
        offload.flush()
        tear(offload)
        with offload:
            pass
    with pytest.raises(ClosedError):
        loss.backward()


def test_a_torn_engine_lets_tensors_pass_until_the_context_is_left(scratch: Path) -> None:
    leaf = torch.randn(4096, requires_grad=True)
    with engine(scratch, prefetch_bytes=0) as offload, offload:
        tear(offload)
        loss = chain(leaf, 4).sum()
        assert offload.stats().offloaded_bytes == 0
        loss.backward()
        offload.flush()


@pytest.mark.parametrize("attached", [False, True])
def test_a_lock_that_an_exception_has_left_held_costs_the_engine_and_no_more(attached: bool, scratch: Path) -> None:
    model, x = nn.Sequential(*(nn.Tanh() for _ in range(4))), torch.randn(4096, requires_grad=True)
    expected = torch.autograd.grad(model(x).sum(), x)
    config = OffloadConfig(tier="nvme", storage_paths=scratch, min_tensor_bytes=0, prefetch_bytes=0)
    offload = tba.attach(model, config=config) if attached else Offloader(model, config)
    with offload if not attached else nullcontext():
        loss = model(x).sum()
    offload.flush()
    offloaded_bytes, lock = offload.stats().offloaded_bytes, lock_of(offload)
    lock.acquire()
    with offload if not attached else nullcontext():
        other = model(x).sum()
    with pytest.raises(RuntimeError, match="un-acquired"):
        lock.release()
    offload.flush()
    assert offload.stats().offloaded_bytes == 2 * offloaded_bytes > 0
    for each in (loss, other):
        assert_bit_equal(torch.autograd.grad(each, x), expected)
    offload.close()


def test_handlers_that_an_exception_has_left_held_back_are_free_after_the_next_entry(scratch: Path) -> None:
    handler = signal.getsignal(signal.SIGINT)
    with engine(scratch) as offload:
        for _ in range(3):
            assert interrupts.arm()
        with offload:
            loss = chain(torch.randn(4096, requires_grad=True), 4).sum()
            assert interrupts._armed == 1
        loss.backward()
        assert not interrupts._armed
        assert signal.getsignal(signal.SIGINT) is handler


def test_an_entry_within_a_call_that_holds_handlers_back_leaves_them_held_back(scratch: Path) -> None:
    @interrupts.whole
    def enters(offload: Offloader) -> int:
        with offload:
            chain(torch.randn(4096, requires_grad=True), 4).sum().backward()
        return interrupts._armed

    with engine(scratch) as offload:
        assert enters(offload) == 1
