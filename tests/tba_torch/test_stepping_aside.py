"""Where torch refuses hooks, ours step aside by themselves and come back: transforms run as in plain PyTorch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.nn import functional

from support.engine import ALL_INT8, engine, save
from support.exactness import assert_bit_equal
from support.planned import SLOW, Block, Training, assert_equal, saved_bytes, train
from tba import OffloadWarning, attach, offload_context
from tba._torch import hook_stack, private

REFUSED = "don't yet support saved tensor hooks"
# Forward-mode transforms script a few functions when they are first used.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")


@pytest.fixture(autouse=True)
def _stack_is_left_empty() -> Iterator[None]:
    yield
    assert private.top_hooks(True) is None
    assert private.hooks_are_enabled()


def cubed(x: Tensor) -> Tensor:
    return (x * x * x).sum()


def _vjp(x: Tensor) -> Tensor:
    out, back = torch.func.vjp(lambda t: t.sin() * t, x)
    gradient: Tensor = back(out)[0]
    return gradient


def _inside_out(x: Tensor) -> Tensor:
    """A vector-Jacobian product that is asked for after its transform has ended, and differentiated again."""
    _, back = torch.func.vjp(torch.sin, x)
    return torch.func.jvp(lambda v: back(v)[0], (x,), (x.cos(),))[1]


TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "grad": torch.func.grad(cubed),
    "grad_and_value": lambda x: torch.add(*torch.func.grad_and_value(cubed)(x)),
    "grad of grad": torch.func.grad(lambda x: torch.func.grad(cubed)(x).sin().sum()),
    "vjp": _vjp,
    "jvp": lambda x: torch.func.jvp(lambda t: t.sin() * t, (x,), (x,))[1],
    "jvp of grad": lambda x: torch.func.jvp(torch.func.grad(cubed), (x,), (x.cos(),))[1],
    "jacrev": lambda x: torch.func.jacrev(lambda t: t.sin() * t)(x[0]).sum(0) + x,
    "hessian": lambda x: torch.func.hessian(cubed)(x[0]).sum(0) + x,
    "vmap of grad": torch.func.vmap(torch.func.grad(cubed)),
    "grad of vmap": torch.func.grad(lambda x: torch.func.vmap(cubed)(x).sin().sum()),
    "after it": _inside_out,
}


class ByFunction(torch.autograd.Function):
    """A chunked loss: its gradients are made in forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, transform: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(torch.cat([transform(part) for part in x.chunk(2)]))
        return cubed(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0], None


class InBackward(torch.autograd.Function):
    """Its backward is a transform."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, transform: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.transform = transform
        return cubed(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.transform(ctx.saved_tensors[0]) * gradients[0], None


PLACES: dict[str, Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]] = {
    "forward": lambda x, transform: transform(x).sum(),
    "a Function's forward": lambda x, transform: ByFunction.apply(x, transform),  # type: ignore[no-any-return]
    "a Function's backward": lambda x, transform: InBackward.apply(x, transform),  # type: ignore[no-any-return]
}


class Net(nn.Module):
    def __init__(self, place: str, transform: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)
        self._loss = lambda x: PLACES[place](x, transform)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.gelu(self.first(x))
        return self._loss(self.second(hidden)) + functional.silu(hidden).mean()


def steps(model: nn.Module, context: AbstractContextManager[Any], flush: Callable[[], None] = lambda: None) -> Any:
    found = []
    for seed in range(3):
        with context:
            loss = model(torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)))
        flush()
        loss.backward()
        found.append((loss.detach(), [parameter.grad.clone() for parameter in model.parameters()]))  # type: ignore[union-attr]
        model.zero_grad()
    return found


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("place", PLACES)
def test_a_transform_in_the_models_forward_runs_as_without_hooks(place: str, transform: str, scratch: Path) -> None:
    def model() -> Net:
        return Net(place, TRANSFORMS[transform])

    wanted = steps(model(), nullcontext())
    with engine(scratch, prefetch_bytes=0) as offload:
        assert_bit_equal(steps(model(), offload, offload.flush), wanted)
        assert offload.stats().read_bytes > 0
        assert offload.stats().errors == 0


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "settings",
    [
        {"tier": "keep"},
        {"tier": "auto"},
        {"tier": "auto", "memory_budget": "1GiB"},
        {"tier": "auto", "memory_budget": "1KiB"},
        {"tier": "nvme", "compress": "exact"},
    ],
    ids=str,
)
@pytest.mark.parametrize("attached", [False, True], ids=["with", "attach"])
def test_transforms_run_in_every_kind_of_context(
    place: str, settings: dict[str, Any], attached: bool, scratch: Path
) -> None:
    transform = TRANSFORMS["grad_and_value"]
    wanted = steps(Net(place, transform), nullcontext())
    model = Net(place, transform)
    make = attach if attached else offload_context
    offload = make(model, min_tensor_bytes=0, storage_paths=scratch, **settings)
    try:
        assert_bit_equal(steps(model, nullcontext() if attached else offload, offload.flush), wanted)
        assert offload.stats().errors == 0
    finally:
        offload.close()


@pytest.mark.parametrize("preset", ["safe8", "compact", ALL_INT8], ids=["safe8", "compact", "int8"])
def test_transforms_run_under_a_lossy_preset(preset: Any, scratch: Path) -> None:
    model = Net("forward", TRANSFORMS["grad_and_value"])
    wanted = steps(Net("forward", TRANSFORMS["grad_and_value"]), nullcontext())
    with engine(scratch, model=model, compress=preset) as offload:
        for (loss, _), (plain_loss, _) in zip(steps(model, offload), wanted, strict=True):
            assert_bit_equal(loss, plain_loss)
        assert offload.stats().offloaded_bytes > 0


class Penalised(Block):
    """A block whose forward makes a gradient."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y = super().forward(x, scale)
        return y + 1e-3 * torch.func.grad(lambda t: functional.gelu(t).square().sum())(y)


def test_a_transform_runs_in_a_recomputed_block(scratch: Path) -> None:
    training, budget = Training(Penalised), int(0.4 * saved_bytes(Penalised))
    settings: dict[str, Any] = SLOW
    with offload_context(training.model, "auto", memory_budget=budget, storage_paths=scratch, **settings) as offload:
        pass
    assert_equal(train(offload, training), train(None, Training(Penalised)))
    plan = offload.plan
    offload.close()
    assert plan
    assert len(plan.recomputed) > 0


def test_what_is_saved_around_a_transform_is_packed_and_what_is_inside_is_not(scratch: Path) -> None:
    x = torch.randn(64, requires_grad=True)
    with engine(scratch) as offload:
        with offload:
            y = save(x * 1)
            before = offload.stats().saved_bytes
            z = torch.func.grad(cubed)(y)
            assert offload.stats().saved_bytes == before > 0
            w = save(z)
            assert offload.stats().saved_bytes == 2 * before
        w.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("order", ["ours inside", "ours outside", "ours between"])
def test_hooks_of_others_are_refused_as_ever(order: str, scratch: Path) -> None:
    seen: list[int] = []

    def theirs() -> saved_tensors_hooks:
        return saved_tensors_hooks(lambda t: (seen.append(1), t)[1], lambda t: t)

    with engine(scratch) as offload:
        contexts = {
            "ours inside": (theirs(), offload),
            "ours outside": (offload, theirs()),
            "ours between": (theirs(), offload, theirs()),
        }[order]
        with offload:
            save(torch.ones(3, requires_grad=True) * 1)
        for context in contexts:
            context.__enter__()
        for _ in range(2):
            with pytest.raises(RuntimeError, match=REFUSED) as caught:
                torch.func.grad(cubed)(torch.ones(3))
            assert not hasattr(caught.value, "__notes__")
        save(torch.ones(3, requires_grad=True) * 1)  # the innermost acts as before
        assert (len(seen), offload.stats().saved_bytes) == ((0, 24) if order == "ours inside" else (1, 12))
        for context in reversed(contexts):
            context.__exit__(None, None, None)


def test_a_programs_own_region_without_hooks_is_one_of_ours_too(scratch: Path) -> None:
    def saved() -> int:
        save(torch.ones(4, requires_grad=True) * 1)
        return offload.stats().saved_bytes

    with engine(scratch) as offload, offload, offload:
        first = saved()
        with disable_saved_tensors_hooks("not here"):
            assert saved() == first
            with disable_saved_tensors_hooks("nor here"):
                assert saved() == first
                with pytest.raises(RuntimeError, match="nor here"), saved_tensors_hooks(lambda t: t, lambda t: t):
                    pass
            with pytest.raises(RuntimeError, match="not here"), saved_tensors_hooks(lambda t: t, lambda t: t):
                pass
            torch.func.grad(cubed)(torch.ones(3))
            assert saved() == first
        assert saved() == 2 * first
        with pytest.raises(ZeroDivisionError), disable_saved_tensors_hooks("not here"):
            raise ZeroDivisionError
        assert saved() == 3 * first
        with pytest.raises(ValueError, match="told to"):
            torch.func.grad(_raises)(torch.ones(3))
        assert saved() == 4 * first


def _raises(_: Tensor) -> Tensor:
    raise ValueError("told to")


def test_a_context_may_be_left_inside_the_region_and_suspended_in_it(scratch: Path) -> None:
    with engine(scratch) as offload:
        offload.__enter__()
        offload.__enter__()
        region = disable_saved_tensors_hooks("not here")
        region.__enter__()
        with offload.suspend():
            torch.func.grad(cubed)(torch.ones(3))
        offload.__exit__(None, None, None)
        region.__exit__(None, None, None)
        save(torch.ones(4, requires_grad=True) * 1)
        assert offload.stats().saved_bytes == 16  # the outer one is on again
        suspended = offload.suspend()
        suspended.__enter__()
        with disable_saved_tensors_hooks("not here"):
            suspended.__exit__(None, None, None)
        save(torch.ones(4, requires_grad=True) * 1)
        assert offload.stats().saved_bytes == 32
        offload.__exit__(None, None, None)


def test_a_context_entered_inside_a_transform_says_that_it_moves_nothing(scratch: Path) -> None:
    with engine(scratch) as offload:

        def function(x: Tensor) -> Tensor:
            with offload:
                return cubed(x)

        with offload:
            with pytest.warns(OffloadWarning, match="hooks are disabled here"):
                torch.func.grad(function)(torch.ones(3))
            save(torch.ones(4, requires_grad=True) * 1)
        assert offload.stats().saved_bytes == 16


def test_another_thread_keeps_its_hooks(scratch: Path) -> None:
    inside, done = threading.Event(), threading.Event()

    def holds(x: Tensor) -> Tensor:
        inside.set()
        assert done.wait(10)
        return cubed(x)

    with engine(scratch) as offload:

        def work() -> None:
            with offload:
                torch.func.grad(holds)(torch.ones(3))

        thread = threading.Thread(target=work)
        thread.start()
        assert inside.wait(10)
        with offload:
            save(torch.ones(4, requires_grad=True) * 1)
        done.set()
        thread.join()
        assert offload.stats().saved_bytes == 16


@pytest.mark.parametrize("wrong", [(), (3,), ("text", True, None)])
def test_a_wrong_call_raises_what_torch_raises_and_leaves_the_hooks_on(wrong: tuple[Any, ...], scratch: Path) -> None:
    with engine(scratch) as offload, offload:
        with pytest.raises(TypeError):
            torch._C._autograd._saved_tensors_hooks_disable(*wrong)  # type: ignore[attr-defined]
        save(torch.ones(4, requires_grad=True) * 1)
        assert offload.stats().saved_bytes == 16


@pytest.mark.parametrize("attached", [False, True], ids=["with", "attach"])
def test_a_torch_that_lacks_the_functions_has_the_old_error_and_the_hint(
    attached: bool, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for function in (private.pop_hooks, private.disable_hooks, private.enable_hooks):
        assert function is not None
        monkeypatch.setattr(torch._C._autograd, function.__name__, function)
    monkeypatch.setattr(private, "hooks_step_aside", False)
    model = Net("forward", TRANSFORMS["grad"])
    make = attach if attached else offload_context
    offload = make(model, "nvme", min_tensor_bytes=0, storage_paths=scratch)
    with pytest.raises(RuntimeError, match=REFUSED) as caught, nullcontext() if attached else offload:
        model(torch.ones(8, 16))
    (note,) = caught.value.__notes__
    assert "`with offload.suspend():`" in note
    with nullcontext() if attached else offload, offload.suspend():
        torch.func.grad(cubed)(torch.ones(3))
    offload.close()


def test_torchs_functions_keep_their_names_and_work_without_ours() -> None:
    disable, enable, pop = (
        getattr(torch._C._autograd, name)
        for name in (
            *("_saved_tensors_hooks_disable", "_saved_tensors_hooks_enable"),
            "_pop_saved_tensors_default_hooks",
        )
    )
    assert (disable.__name__, enable.__name__) == ("_saved_tensors_hooks_disable", "_saved_tensors_hooks_enable")
    with pytest.raises(RuntimeError):
        pop()  # there is none
    disable("not here", fail_if_non_empty=True)
    assert not private.hooks_are_enabled()
    enable()
    assert hook_stack.innermost() is None
