"""Whole models, compiled by `tba.compile_backend`, are bit for bit those that PyTorch compiles by itself.

The reference has no operator of ours: so these tests also show that the compiler makes the same kernels.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch.nn import functional

from io_backends import PosixStore, Store, StoreError
from io_backends.testing import Fault, FaultyStore, Operation
from support.compiled import own_compiler
from support.exactness import Observer, assert_bit_equal, run_training
from support.whole_models import BATCH, PROGRAMS, WIDTH, Net, batch, dynamic_batches
from tba import (
    ClosedError,
    CompileBackend,
    OffloadConfig,
    Offloader,
    OffloadStats,
    TransferError,
    attach,
    offload_context,
)

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler; there is no g++"),
    # From the compiler itself.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex:UserWarning"),
]
# All moves, however small, and little is in memory at once.
ALL: dict[str, Any] = {"tier": "nvme", "min_tensor_bytes": 64, "prefetch_bytes": 0, "staging_bytes": 1 << 14}


@pytest.fixture(scope="module")
def _compiled_code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture(autouse=True)
def _own_compiler(_compiled_code: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with own_compiler(_compiled_code, monkeypatch):
        yield


@contextmanager
def backend(scratch: Path, store: Store | None = None, **settings: Any) -> Iterator[CompileBackend]:
    config = OffloadConfig(**({"storage_paths": scratch} | ALL | settings))
    made = CompileBackend(config, store=store)
    try:
        yield made
    finally:
        made.close()
        torch.compiler.reset()


def _train(name: str, using: Any) -> Any:
    make_model, make_batch, settings = PROGRAMS[name]
    dynamic = name == "dynamic"

    def compiled() -> nn.Module:
        torch.compiler.reset()
        model = make_model()
        model.compile(backend=using, dynamic=dynamic or None)
        return model

    return run_training(compiled, dynamic_batches() if dynamic else make_batch, **settings)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_whole_model_is_what_the_compiler_makes_alone(name: str, scratch: Path) -> None:
    plain = _train(name, "inductor")
    with backend(scratch) as moving:
        _train(name, moving).assert_equals(plain)
        gc.collect()
        stats = moving.stats()
    assert 0 < stats.offloaded_bytes <= stats.written_bytes == stats.read_bytes, stats
    assert not stats.errors
    assert not stats.live_records


def _in_place(model: nn.Module) -> nn.Module:
    model.compile()
    return model


# How a model is compiled, whether it is attached or in a context, and whether that has the wrapper or what is inside.
WHOLE: dict[str, tuple[Callable[[nn.Module], Any], Callable[..., Offloader], bool]] = {
    "nanoGPT": (torch.compile, offload_context, True),
    "inside": (torch.compile, offload_context, False),
    "in place": (_in_place, offload_context, True),
    "attached": (torch.compile, attach, True),
    "attached inside": (torch.compile, attach, False),
    "attached in place": (_in_place, attach, True),
}


@pytest.mark.parametrize(
    "way", ["nanoGPT", *(pytest.param(way, marks=pytest.mark.exhaustive) for way in WHOLE if way != "nanoGPT")]
)
@pytest.mark.slow
def test_a_whole_model_moves_within_its_graph_by_itself(way: str, scratch: Path) -> None:
    plain = _train("net", "inductor")
    compile_, begin, wrapper = WHOLE[way]
    made: list[Offloader] = []

    def compiled() -> nn.Module:
        model = Net()
        called: nn.Module = compile_(model)
        made.append(begin(called if wrapper else model, **ALL, storage_paths=scratch))
        return called

    context = None if begin is attach else lambda _: made[0]
    found = run_training(compiled, batch, context=context)
    assert_bit_equal([*found.losses, *found.weights.values()], [*plain.losses, *plain.weights.values()])
    gc.collect()
    stats = made[0].stats()
    made[0].close()
    assert stats.steps == stats.micro_batches == 3
    assert stats.last_step is not None
    # What the graph does not move may be written and then found in memory. Whole blocks are counted: by its address, a
    # tensor that is read may need one more than when it was written.
    assert 0 < stats.last_step.read_bytes <= stats.last_step.written_bytes + 16 * 512, stats
    assert stats.step_peak_bytes < stats.plain_peak_bytes
    assert (stats.errors, stats.live_records, stats.resident_bytes) == (0, 0, 0)
    assert not [each.name for each in threading.enumerate() if each.name.startswith("tba-")]


@pytest.mark.exhaustive
def test_a_model_goes_back_to_its_own_code_and_each_offloader_has_its_own(scratch: Path) -> None:
    torch.manual_seed(5)
    x, model = torch.randn(BATCH, WIDTH), Net(dropout=0.0)
    called: Any = torch.compile(model)
    counters.clear()
    once = _gradients(called, called(x))

    def graphs(called: Any = called) -> int:
        assert_bit_equal(_gradients(called, called(x)), once)
        return counters["stats"]["unique_graphs"]

    assert graphs() == 1
    written = []
    for number in (2, 3):
        offload = attach(called, **ALL, storage_paths=scratch)
        assert graphs() == graphs() == number
        gc.collect()
        written.append(offload.stats().written_bytes)
        offload.close()
        assert graphs() == number
        assert offload.stats().written_bytes == written[-1]
    assert min(written) > 0
    offload = attach(called, **ALL, storage_paths=scratch)
    assert graphs() == 4
    del called, model, offload, graphs
    gc.collect()
    for thread in threading.enumerate():  # of an Offloader that was not closed: they end by themselves
        if thread.name.startswith("tba-"):
            thread.join(60)
            assert not thread.is_alive(), thread.name


def _compiled(using: Any, model: nn.Module) -> nn.Module:
    torch.compiler.reset()
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    model.compile(backend=using)
    return model


def _gradients(model: nn.Module, loss: Tensor, **settings: Any) -> list[Tensor]:
    return [each.clone() for each in torch.autograd.grad(loss, list(model.parameters()), **settings)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("share", [0.3, 0.6])
def test_a_budget_holds_inside_one_graph(share: float, scratch: Path) -> None:
    x = torch.randn(BATCH, WIDTH)
    found: list[OffloadStats] = []
    gradients = []
    budget_bytes = 0
    for settings in ({}, {"tier": "auto", "prefetch_bytes": 1 << 16, "staging_bytes": 1 << 16, "derive": False}):
        if settings:
            budget_bytes = int(share * found[0].plain_peak_bytes)
            settings["memory_budget"] = budget_bytes
        with backend(scratch, **settings) as moving:
            model = _compiled(moving, Net(12, dropout=0.0))
            gradients.append(_gradients(model, model(x)))
            gc.collect()
            found.append(moving.stats())
    assert_bit_equal(gradients[1], gradients[0])
    everything, within = found
    assert everything.step_peak_bytes < budget_bytes
    assert within.step_peak_bytes <= budget_bytes
    assert 0 < within.written_bytes < everything.written_bytes


class Wide(Net):
    """Each layer saves large tensors and small ones."""

    def __init__(self) -> None:
        super().__init__(0)
        del self.norm
        self.layers = nn.ModuleList(nn.Linear(*sizes) for _ in range(8) for sizes in ((WIDTH, 256), (256, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.layers[::2], self.layers[1::2], strict=True):
            x = x + down(functional.gelu(up(x.sin()))).exp().sin()
        return x.square().mean()


@pytest.mark.exhaustive
def test_a_graph_computes_again_what_costs_less_than_moving(scratch: Path) -> None:
    torch.manual_seed(6)
    x, small_bytes = torch.randn(BATCH, WIDTH), 4 * BATCH * WIDTH
    settings = {"tier": "auto", "min_tensor_bytes": 2 * small_bytes, "staging_bytes": 8 * small_bytes}
    settings["max_write_rate"] = 10_000_000  # moving costs more than all else, on any machine
    gradients, kept, moved, plans = [], [], [], []
    # All fits; what costs nothing to compute again is enough; some moves instead; small products are computed too.
    budgets = ((1 << 30, True), (46 * small_bytes, True), (46 * small_bytes, False), (24 * small_bytes, True))
    for budget_bytes, derive in budgets:
        with backend(scratch, **settings, memory_budget=budget_bytes, derive=derive) as moving:
            model = _compiled(moving, Wide())
            with (watch := Observer(model)):
                loss = model(x)
            gradients.append(_gradients(model, loss))
            del loss
            gc.collect()
            kept.append(watch.saved_bytes - watch.weight_bytes)
            moved.append(moving.stats())
            plans += moving.plans
            assert moved[-1].step_peak_bytes <= budget_bytes
    assert_bit_equal(gradients[1:], 3 * gradients[:1])
    assert [plan.recomputed_bytes > 0 for plan in plans] == [False, True, False, True]
    assert [plan.moved_bytes > 0 for plan in plans] == [each.written_bytes > 0 for each in moved]
    assert [plan.moved_bytes > 0 for plan in plans] == [False, False, True, False]
    assert all(plan.peak_bytes <= budget_bytes for plan, (budget_bytes, _) in zip(plans, budgets, strict=True))
    assert kept[3] < kept[1] < kept[0]
    assert kept[3] <= 16 * small_bytes


@pytest.mark.exhaustive
@pytest.mark.parametrize("derive", [True, False])
def test_a_budget_of_a_small_graph_holds_by_what_the_engine_counts(derive: bool, scratch: Path) -> None:
    """Few tensors of very different sizes: each window is a large part of the budget."""
    torch.manual_seed(6)
    x, small_bytes = torch.randn(BATCH, WIDTH), 4 * BATCH * WIDTH
    settings: dict[str, Any] = {"tier": "auto", "min_tensor_bytes": 64, "storage_paths": scratch, "derive": derive}
    gradients, moved = [], []
    for budget_bytes in (1 << 30, *(each * small_bytes for each in ((24, 42) if derive else (33, 42)))):
        model = Wide()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(6))
        model.compile()
        offload = Offloader(model, OffloadConfig(memory_budget=budget_bytes, **settings))
        for _ in range(3):
            with offload:
                loss = model(x)
            found = _gradients(model, loss)
            del loss
            gc.collect()
            assert offload.stats().step_peak_bytes <= budget_bytes
        gradients.append(found)
        moved.append(offload.stats().written_bytes)
        offload.close()
        torch.compiler.reset()
    assert_bit_equal(gradients[1:], (len(gradients) - 1) * gradients[:1])
    assert max(moved) > moved[0] == 0


def _fails(operation: Operation, *numbers: int, error: str = "no") -> Callable[[Operation, int], Fault | None]:
    """Fail these transfers, or all of the kind if none is named."""

    def plan(asked: Operation, number: int) -> Fault | None:
        fails = asked == operation and (not numbers or number in numbers)
        return Fault(error=StoreError(error)) if fails else None

    return plan


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """A shell in the background has SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("_interruptible")
@pytest.mark.filterwarnings("ignore:.*stays in memory:tba.OffloadWarning")
def test_a_graph_whose_transfers_fail_or_are_interrupted_ends_as_plain(scratch: Path) -> None:
    """In one compiled graph: failing writes, reads that fail, a full disk, Ctrl-C in forward and in backward."""
    torch.manual_seed(6)
    x = torch.randn(BATCH, WIDTH)
    fault: list[Any] = [lambda operation, number: None]
    store = FaultyStore(PosixStore(scratch), lambda operation, number: fault[0](operation, number))

    def strikes(operation: Operation) -> Callable[[Operation, int], None]:
        left = iter([False, False, True])  # in the midst

        def plan(asked: Operation, number: int) -> None:
            if asked == operation and next(left, False):
                os.kill(os.getpid(), signal.SIGINT)

        return plan

    with backend(scratch, store=store) as moving:
        model = _compiled(moving, Net(dropout=0.0))
        once = _gradients(model, model(x))
        moved_bytes = moving.stats().offloaded_bytes

        def left() -> tuple[int, int]:
            gc.collect()
            stats = moving.stats()
            return stats.live_records, stats.resident_bytes

        def again() -> None:
            """Nothing is left, and the next step is what the first was."""
            fault[0] = lambda operation, number: None
            for _ in range(200):  # a worker may be ending its write
                if left() == (0, 0):
                    break
                time.sleep(0.01)
            assert left() == (0, 0)
            assert_bit_equal(_gradients(model, model(x)), once)

        for why in ("no", "no space left on device"):
            fault[0] = _fails("write", error=why)
            before = moving.stats()
            assert_bit_equal(_gradients(model, model(x)), once)
            assert moving.stats().written_bytes == before.written_bytes
            assert moving.stats().kept_by_reason["write failed"] > before.kept_by_reason.get("write failed", 0)
            again()
        fault[0] = _fails("read")
        loss = model(x)
        with pytest.raises(TransferError, match="no"):
            loss.backward()
        del loss
        model.zero_grad()
        again()
        fault[0] = strikes("write")
        with pytest.raises(KeyboardInterrupt):
            model(x)
        again()
        loss = model(x)
        fault[0] = strikes("read")
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
        del loss
        model.zero_grad()
        again()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            written = moving.stats().written_bytes
            for _ in range(200):
                _gradients(model, model(x))
            again()
        stats = moving.stats()
        assert stats.written_bytes - written >= 201 * moved_bytes > 0
        assert stats.file_bytes <= 1 << 20  # one step's, as the file grows


@pytest.mark.exhaustive
def test_graphs_are_kept_dropped_and_never_made(scratch: Path) -> None:
    x = torch.randn(BATCH, WIDTH)
    with backend(scratch) as moving, functorch_config.patch(donated_buffer=False):
        model = _compiled(moving, Net(dropout=0.0))
        loss = model(x)
        once = _gradients(model, loss, retain_graph=True)
        assert_bit_equal(_gradients(model, loss, retain_graph=True), once)
        assert_bit_equal(_gradients(model, loss), once)
        del loss
        gc.collect()
        before = moving.stats()
        with torch.no_grad():
            model(x)
        assert moving.stats().written_bytes == before.written_bytes
        model(x)  # its graph is dropped
        gc.collect()
        after = moving.stats()
        assert after.offloaded_bytes == 2 * before.offloaded_bytes  # written ones are padded
        assert after.read_bytes == before.read_bytes == 3 * before.written_bytes
        assert (after.live_records, after.resident_bytes) == (0, 0)
        loss = model(x)
        moving.close()
        with pytest.raises(ClosedError):
            loss.backward()
        assert_bit_equal(_gradients(model, model(x)), once)
