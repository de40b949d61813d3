"""Where a step begins and ends, however much of it the context is around, and that it ends once."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from io_backends import PosixStore, Syscalls
from support.engine import activation, chain, engine, stored_chain
from tba import Offloader, OffloadStats, OffloadWarning, attach
from tba._engine import steps

BATCH, WIDTH, LAYERS = 2048, 64, 4
STEPS = 5


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)])


def train(
    model: nn.Module,
    around: Callable[[str], AbstractContextManager[object]],
    flush: Callable[[], None],
    seen: Callable[[], None] = lambda: None,
) -> None:
    """`around` what is called "training", "step" and "forward"; the saved tensors go through the store."""
    with around("training"):
        for step in range(STEPS):
            with around("step"):
                with around("forward"):
                    loss = model(torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step)))
                flush()
                loss.square().mean().backward()
            seen()


def assert_whole(step: OffloadStats | None) -> None:
    """A whole step: its forward and its backward."""
    assert step is not None
    assert step.offloaded_bytes >= LAYERS * BATCH * WIDTH * 4
    assert step.read_bytes + step.forwarded_bytes >= step.offloaded_bytes


@contextmanager
def followed(around: str, model: nn.Module, scratch: Path) -> Iterator[Offloader]:
    """An engine that moves everything, tied to the model where there is to be no context around anything."""
    if around == "attach":
        with closing(attach(model, tier="nvme", min_tensor_bytes=0, storage_paths=scratch)) as tied:
            yield tied
    else:
        with engine(scratch, model=model) as offload:
            yield offload


@pytest.mark.parametrize("around", ["training", "step", "forward", "attach"])
def test_a_step_is_counted_once_and_whole(around: str, scratch: Path) -> None:
    model = small_model()
    with followed(around, model, scratch) as offload:
        train(model, lambda what: offload if what == around else nullcontext(), offload.flush)
        stats = offload.stats()
    assert stats.steps == STEPS
    assert_whole(stats.last_step)
    assert stats.last_step is not None
    assert stats.last_step.saved_bytes == stats.saved_bytes // STEPS


def test_the_numbers_may_be_asked_for_after_each_step_and_in_its_middle(scratch: Path) -> None:
    steps = list[OffloadStats | None]()
    with engine(scratch, model=(model := small_model())) as offload:

        def forward(what: str) -> AbstractContextManager[object]:
            return offload if what == "forward" else nullcontext()

        def middle() -> None:
            offload.flush()
            assert offload.stats().live_records > 0  # no backward has run: the step goes on

        train(model, forward, middle, lambda: steps.append(offload.stats().last_step))
        assert offload.stats().steps == STEPS
    for step in steps:
        assert_whole(step)


def test_a_second_backward_outside_ends_no_step_of_its_own(scratch: Path) -> None:
    with engine(scratch, model=(model := small_model())) as offload:
        x = torch.randn(BATCH, WIDTH)
        losses = list[Tensor]()
        for _ in range(2):
            with offload:
                first, second = (model(x).square().mean() for _ in range(2))
                first.backward()
            losses.append(second)
            second.backward()  # the step has ended with its context
        assert offload.stats().steps == 2


def test_around_the_forward_alone_steps_of_one_size_give_no_blocks_back(scratch: Path) -> None:
    """Ended twice a step, the second time with nothing written since, the file would be laid out anew each time."""
    punched = list[tuple[int, int]]()
    store = PosixStore(scratch, syscalls=Syscalls(punch=lambda _, offset, length: punched.append((offset, length))))
    with engine(scratch, store=store) as offload:
        for _ in range(3):
            _, y = stored_chain(offload, 5 << 20, length=4)  # of 20 MiB each
            y.sum().backward()
            del y
            assert offload.stats().file_bytes > 60 << 20
        assert not punched


def test_a_tier_that_moved_nothing_says_so_where_its_context_is_left(scratch: Path) -> None:
    model = small_model()
    with engine(scratch, model=model, min_tensor_bytes=1 << 30) as offload:
        with pytest.warns(OffloadWarning, match="moved nothing"), offload:  # noqa: PT031  # leaving is what warns
            model(torch.randn(BATCH, WIDTH))
            with warnings.catch_warnings(action="error"), offload:  # leaves nothing: the outer one is still there
                loss = model(torch.randn(BATCH, WIDTH)).square().mean()
        loss.backward()


def test_a_step_that_fits_in_the_window_says_that_it_was_held_back(scratch: Path) -> None:
    nbytes = 4 * 4 << 20
    with engine(scratch, prefetch_bytes=nbytes) as offload:
        for _ in range(2):
            leaf, x = activation(1 << 20)
            with offload:
                y = chain(x, 4)
            y.sum().backward()
            del leaf, x, y
        stats = offload.stats()
        assert (stats.offloaded_bytes, stats.written_bytes, stats.held_bytes) == (2 * nbytes, 0, nbytes)
        text = "nothing was written: everything was held back for backward, which needs it first (16.0 MiB at most)"
        assert text in str(stats)
    with engine(scratch, prefetch_bytes=nbytes // 2) as offload:
        x = activation(1 << 20)[1]
        with offload:
            chain(x, 4)
        stats = offload.stats()
        assert 0 < stats.held_bytes <= nbytes // 2
        assert "nothing was written" not in str(stats)


ACCUMULATED = 2


def accumulate(
    model: nn.Module,
    around: Callable[[str], AbstractContextManager[object]],
    optimizer: torch.optim.Optimizer,
    seen: Callable[[], object] = lambda: None,
) -> None:
    """`STEPS` steps of `ACCUMULATED` micro-batches; `around` the "training", "step", "micro-batch" and "forward"."""
    with around("training"):
        for _ in range(STEPS):
            with around("step"):
                for _ in range(ACCUMULATED):
                    with around("micro-batch"):
                        with around("forward"):
                            loss = model(torch.randn(BATCH, WIDTH)).square().mean()
                        loss.backward()
                    seen()
                optimizer.step()
                optimizer.zero_grad()
            seen()


def assert_accumulated(stats: OffloadStats) -> None:
    assert (stats.steps, stats.micro_batches) == (STEPS, ACCUMULATED * STEPS)
    assert stats.last_step is not None
    assert (stats.last_step.steps, stats.last_step.micro_batches) == (1, ACCUMULATED)
    assert stats.last_step.saved_bytes == stats.saved_bytes // STEPS


@pytest.mark.parametrize("asked", [False, True], ids=["asked at the end", "asked all along"])
@pytest.mark.parametrize("around", ["training", "step", "micro-batch", "forward", "attach"])
def test_accumulated_micro_batches_are_one_step(around: str, asked: bool, scratch: Path) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with followed(around, model, scratch) as offload:
        ask = offload.stats if asked else nullcontext
        accumulate(model, lambda what: offload if what == around else nullcontext(), optimizer, ask)
        assert_accumulated(offload.stats())


def test_without_a_model_any_optimizer_ends_a_step(scratch: Path) -> None:
    model = small_model()
    with engine(scratch) as offload:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accumulate(model, lambda what: offload if what == "training" else nullcontext(), optimizer)
        assert_accumulated(offload.stats())


def test_an_optimizer_of_another_model_ends_none(scratch: Path) -> None:
    model = small_model()
    with engine(scratch, model=model) as offload:
        other = torch.optim.SGD(small_model().parameters(), lr=0.1)
        accumulate(model, lambda what: offload if what == "training" else nullcontext(), other)
        stats = offload.stats()
        assert (stats.steps, stats.micro_batches) == (ACCUMULATED * STEPS, ACCUMULATED * STEPS)


def test_a_step_of_the_optimizer_that_follows_no_backward_of_ours_ends_none(scratch: Path) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with engine(scratch, model=model) as offload:
        optimizer.step()
        accumulate(model, lambda what: offload if what == "step" else nullcontext(), optimizer)
        for _ in range(3):  # a training outside of the context
            model(torch.randn(BATCH, WIDTH)).sum().backward()
            optimizer.step()
        assert_accumulated(offload.stats())


def test_one_optimizer_to_each_parameter_stepping_in_backward_makes_one_step(scratch: Path) -> None:
    model = small_model()
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    with engine(scratch, model=model) as offload, offload:
        for step in range(STEPS):
            assert offload.stats().steps == max(0, step - 1)  # the last is open until the next begins
            model(torch.randn(BATCH, WIDTH)).sum().backward()
    assert (offload.stats().steps, offload.stats().micro_batches) == (STEPS, STEPS)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated", "ignore:Profiler record function")
def test_a_compiled_optimizer_ends_steps_too(scratch: Path) -> None:
    """Traced, what counts them would vanish from the compiled code."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graphs = list[torch.fx.GraphModule]()

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    with engine(scratch, model=model) as offload:
        optimizer.step = torch.compile(optimizer.step, backend=backend)  # type: ignore[method-assign]
        accumulate(model, lambda what: offload if what == "training" else nullcontext(), optimizer)
        assert_accumulated(offload.stats())
    assert graphs


@pytest.mark.parametrize(("tier", "rank", "tells"), [("nvme", "0", True), ("nvme", "1", False), ("keep", "0", False)])
def test_a_long_first_step_tells_how_far_it_has_come_and_no_other_does(
    tier: str, rank: str, tells: bool, scratch: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A clock that goes on by four seconds whenever it is read; lines come at ten, and then at twice the time."""
    seconds = itertools.count(start=100, step=4)
    monkeypatch.setattr(steps, "time", SimpleNamespace(perf_counter=lambda: float(next(seconds))))
    monkeypatch.setenv("RANK", rank)
    with engine(scratch, tier=tier, prefetch_bytes=0) as offload:
        for _ in range(2):
            _, y = stored_chain(offload, 4096)
            y.sum().backward()
            offload.stats()
            told = [record.getMessage() for record in caplog.records]
            assert len(told) == (3 * tells), told  # of 16 looks: forward and backward of 8 tensors of 16 KiB
    if tells:
        assert re.search(r"the first step takes 12 s so far: 80\.0 KiB saved, 80\.0 KiB to go out of memory", told[0])
        assert re.search(r" 24 s so far: 128\.0 KiB saved, .*, 0 B read back$", told[1])
        assert re.search(r" 48 s so far: 128\.0 KiB saved, .*, [1-9][\d.]* KiB read back$", told[2])
