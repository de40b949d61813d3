"""Re-entry: what comes in while a hook runs (a finaliser, a trace function) changes nothing; what breaks a hook off is
told, and the next entry has an engine that is whole."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import io_backends
import tba
from io_backends import interrupts
from support.engine import chain, engine
from support.exactness import assert_bit_equal
from support.interrupts import Interrupt
from support.signals import Place, at, places
from tba import ClosedError, OffloadConfig, Offloader
from tba._torch import private
from tba._torch.hook_stack import owners

ENGINE = tuple(os.path.join(os.path.dirname(package.__file__ or ""), "") for package in (tba, io_backends))
SETTINGS: dict[str, dict[str, Any]] = {
    "nvme": {"tier": "nvme", "staging_bytes": 1 << 15, "prefetch_bytes": 1 << 14},
    "auto": {"tier": "auto", "memory_budget": 1 << 14},
    "attached": {"tier": "nvme", "staging_bytes": 1 << 15, "prefetch_bytes": 1 << 14},
    "exact": {"tier": "nvme", "compress": "exact", "prefetch_bytes": 0},
}


class Model(nn.Module):
    """Saves views, weights, duplicates and small tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).square().sum()


class Bench:
    """A model under an engine, and what its gradients are to be."""

    def __init__(self, offload: Offloader, model: nn.Module, x: Tensor) -> None:
        self.offload, self.model, self.x = offload, model, x
        self._entered: AbstractContextManager[object] = nullcontext() if offload.tied else offload
        for _ in range(2):
            self.step()
        self.expected = self.gradients()
        gc.collect()
        gc.freeze()

    def step(self) -> None:
        self.model.zero_grad()
        with self._entered:
            loss = self.model(self.x)
        self.offload.flush()
        loss.backward()
        del loss
        self.offload.stats()

    def gradients(self) -> list[Tensor]:
        return [parameter.grad.clone() for parameter in self.model.parameters() if parameter.grad is not None]

    def check(self) -> None:
        self.step()
        assert_bit_equal(self.gradients(), self.expected)
        assert private.top_hooks(True) is None
        assert not owners()
        assert not interrupts._armed
        gc.collect()
        stats = self.offload.stats()
        assert (stats.live_records, stats.resident_bytes) == (0, 0)
        saver = self.offload._saver
        assert (saver.mover.staging.count, saver.mover.staging.bytes, saver.ledger.held_bytes) == (0, 0, 0)


@pytest.fixture(params=SETTINGS)
def bench(request: pytest.FixtureRequest, scratch: Path) -> Any:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(2, 16, 16)
    config = OffloadConfig(storage_paths=scratch, min_tensor_bytes=0, io_timeout=5.0, **SETTINGS[request.param])
    offload = tba.attach(model, config=config) if request.param == "attached" else Offloader(model, config)
    yield Bench(offload, model, x)
    offload.close()
    while private.top_hooks(True) is not None:  # of a test that has failed
        private.pop_hooks()


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
@pytest.mark.parametrize("every", [23, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.exhaustive])])
def test_what_trains_in_the_midst_of_a_hook_is_exact_and_changes_nothing(how: str, every: int, bench: Bench) -> None:
    other, errors = Other(bench.offload), list[BaseException]()
    trains = other.train if how == "trace function" else lambda: _collects(other.train, errors)
    for place in _sample(places(bench.step, ENGINE), every):
        other.leave_a_graph()
        before = other.trained
        at(place, bench.step, trains)
        assert_bit_equal(bench.gradients(), bench.expected)
        other.older = None
        assert not errors, f"at {place}: {errors}"
        assert other.trained <= before + 1
        bench.check()
    assert other.trained > 5


@pytest.mark.parametrize("kind", [Interrupt, RuntimeError, OSError])
@pytest.mark.parametrize("every", [23, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.exhaustive])])
def test_an_error_of_a_trace_function_reaches_the_program_and_the_next_step_is_exact(
    kind: type[BaseException], every: int, bench: Bench
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


def _torn(offload: Offloader) -> None:
    """As where an exception leaves it in the midst of a change."""
    offload._saver.left_by(Interrupt())
    assert offload._saver.torn


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
        _torn(offload)
        before = offload._saver
        with offload:
            other = chain(leaf.relu(), 4).sum()
        assert offload._saver is not before
        for each in (loss, other):
            assert_bit_equal(torch.autograd.grad(each, leaf, retain_graph=True), expected)
        del each
        assert offload.stats().saved_bytes > 0


def test_closing_ends_a_torn_engine_too(scratch: Path) -> None:
    leaf = torch.randn(4096, requires_grad=True)
    with engine(scratch, prefetch_bytes=0) as offload:
        with offload:
            loss = chain(leaf, 4).sum()
        offload.flush()
        _torn(offload)
        with offload:
            pass
    with pytest.raises(ClosedError):
        loss.backward()


def test_a_torn_engine_lets_tensors_pass_until_the_context_is_left(scratch: Path) -> None:
    leaf = torch.randn(4096, requires_grad=True)
    with engine(scratch, prefetch_bytes=0) as offload, offload:
        _torn(offload)
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
    before, offloaded_bytes = offload._saver, offload.stats().offloaded_bytes
    before.lock.acquire()
    with offload if not attached else nullcontext():
        other = model(x).sum()
    assert offload._saver is not before
    assert not before.came_back()
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
