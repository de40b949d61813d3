"""Attach: models that a loop we do not own calls, interrupted forwards, copies and saved states."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from support.exactness import assert_bit_equal
from support.models import Made
from tba import ConfigError, Offloader, attach, offload_context
from tba._torch import private
from tba._torch.foreign import line_to_delete
from tba._torch.hook_stack import _stack

Attach = Callable[..., Offloader]


class Interrupted(nn.Module):
    """A model whose forward a Ctrl-C ends where it is told so."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.inner = inner
        self.interrupt = False

    def forward(self, x: Tensor) -> Tensor:
        if self.inner is not None:
            x = self.inner(x)
        x = self.linear(x).tanh()
        if self.interrupt:
            raise KeyboardInterrupt
        return x


@pytest.fixture
def attached(scratch: Path) -> Iterator[Attach]:
    """Attaches models, and closes at the end."""
    made: list[Offloader] = []

    def make(model: nn.Module, tier: str = "nvme", **settings: Any) -> Offloader:
        made.append(attach(model, tier, min_tensor_bytes=0, storage_paths=scratch, **settings))
        return made[-1]

    yield make
    for offload in made:
        offload.close()


def _pairs_on_the_stack() -> int:
    return len(_stack())


def _interrupt(model: Interrupted) -> None:
    model.interrupt = True
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(2, 8))
    model.interrupt = False


@pytest.mark.parametrize("kept", [True, False])
def test_hooks_of_others_that_ended_above_an_interrupted_forward_do_not_stay(kept: bool, attached: Attach) -> None:
    """Their end pops the innermost pair, which is ours: theirs is left where it was."""
    model, handler = Interrupted(), signal.getsignal(signal.SIGINT)
    offload = attached(model)
    with nullcontext() if kept else torch.autograd.graph.save_on_cpu():
        _interrupt(model)
    assert _pairs_on_the_stack() == 1
    x = torch.randn(2, 8)
    out = model(x)
    assert _pairs_on_the_stack() == 0
    assert not offload.entered
    bias = model.linear.bias
    expected = torch.autograd.grad(x.matmul(model.linear.weight.T).add(bias).tanh().sum(), bias)
    assert_bit_equal(torch.autograd.grad(out.sum(), bias), expected)
    assert signal.getsignal(signal.SIGINT) is handler


class Counts(TorchFunctionMode):
    """Counts the calls that it sees."""

    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("interrupted_within", [False, True])
def test_a_torch_function_mode_of_the_user_outlives_an_interrupted_forward(
    interrupted_within: bool, attached: Attach
) -> None:
    model, mode = Interrupted(), Counts()
    attached(model, compress="safe8")
    with mode if interrupted_within else nullcontext():
        _interrupt(model)
    before, x = mode.calls, torch.randn(2, 8)
    with mode:
        model(x)
    assert mode.calls > before
    assert private.function_mode_count() == 0
    before = mode.calls
    model(x)
    assert mode.calls == before


@pytest.mark.parametrize("how", ["attach", "with"])
def test_the_next_entry_takes_off_what_interrupted_forwards_have_left(how: str, attached: Attach) -> None:
    for _ in range(3):  # as cells of a notebook, each with a model of its own
        model = Interrupted()
        offload = attached(model)
        _interrupt(model)
        assert _pairs_on_the_stack() == 1
        offload.close()
    if how == "with":
        with offload_context(None, "keep"):
            assert _pairs_on_the_stack() == 1
    else:
        offload = attached(model := Interrupted())
        assert _pairs_on_the_stack() == 0
        model(torch.randn(2, 8)).sum().backward()
        assert offload.stats().offloaded_bytes > 0
    assert _pairs_on_the_stack() == 0


def test_a_pair_of_a_forward_that_still_runs_stays(attached: Attach) -> None:
    inner = Interrupted()
    outer = Interrupted(inner)
    offloads = [attached(model) for model in (outer, inner)]
    seen: list[int] = []
    inner.linear.register_forward_hook(lambda *_: seen.append(_pairs_on_the_stack()))
    outer(torch.randn(2, 8)).sum().backward()
    assert seen == [2]
    _interrupt(inner)  # leaves its own pair; the outer one's forward then clears that, and keeps its own
    outer(torch.randn(2, 8)).sum().backward()
    assert seen == [2, 1, 2]
    assert _pairs_on_the_stack() == 0
    assert not any(offload.entered for offload in offloads)


def test_a_second_attach_with_other_settings_is_an_error(scratch: Path) -> None:
    model = nn.Linear(4, 4)
    offload = attach(model, "nvme", storage_paths=scratch)
    assert attach(model, "nvme", storage_paths=scratch) is offload
    with pytest.raises(ConfigError, match=r"on one Linear: .*attached already.*tier='keep' instead of 'nvme'"):
        attach(model, "keep")
    offload.close()
    attach(model, "keep").close()


@pytest.mark.parametrize("compress", [None, "safe8"])
def test_an_attached_model_is_loaded_where_tba_is_not_installed(scratch: Path, compress: str | None) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    offload = attach(model, "auto", storage_paths=scratch, compress=compress)
    torch.save(model, scratch / "model.pt")
    offload.close()
    program = f"""
import sys
sys.modules.update(dict.fromkeys(("tba", "compact", "io_backends")))  # importing them is an error
import torch
model = torch.load({str(scratch / "model.pt")!r}, weights_only=False)
model(torch.ones(2, 4)).sum().backward()
print(model[0].weight.grad.shape)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert run.stdout.strip() == "torch.Size([4, 4])", run.stderr


def test_nothing_is_entered_where_no_gradient_is_recorded(attached: Attach) -> None:
    model = Interrupted()
    offload = attached(model)
    entered: list[bool] = []
    model.linear.register_forward_hook(lambda *_: entered.append(offload.entered))
    x = torch.randn(2, 8)
    with torch.no_grad():
        without = model(x)
    with torch.inference_mode():
        model(x)
    assert_bit_equal(model(x).detach(), without)
    assert entered == [False, False, True]
    with torch.no_grad():
        _interrupt(model)
    model(x).sum().backward()
    assert not offload.entered


class _TheirOffload(torch.autograd.graph.saved_tensors_hooks):
    """As libraries have them."""

    def __init__(self) -> None:
        super().__init__(self._to, self._back)

    def _to(self, x: Tensor) -> Tensor:
        return x.detach().clone()

    def _back(self, x: Tensor) -> Tensor:
        return x


class _Inside(nn.Module):
    """A model that enters another offloader around its layers."""

    def __init__(self, context: Any) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
        self.context = context

    def forward(self, x: Tensor) -> Tensor:
        with self.context():
            return self.layers(x).sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("context", "name", "line"),
    [
        (_TheirOffload, r"test_attach\._TheirOffload", "switch that offloading off"),
        (torch.autograd.graph.save_on_cpu, r"torch\.autograd\.graph\.save_on_cpu", "delete `with torch.*save_on_cpu"),
    ],
)
@pytest.mark.parametrize("how", ["context", "attach", "auto"])
def test_another_pair_of_hooks_inside_is_named(context: Any, name: str, line: str, how: str, scratch: Path) -> None:
    model = _Inside(context)
    x = torch.randn(8, 64)
    settings: dict[str, Any] = {"storage_paths": scratch, "min_tensor_bytes": 0}
    if how == "attach":
        offload = attach(model, "nvme", **settings)
    else:
        offload = offload_context(model, "nvme" if how == "context" else "auto", **settings)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(4):
            with nullcontext() if how == "attach" else offload:
                model(x).backward()
    assert not model.layers[0]._forward_pre_hooks
    messages = [str(warning.message) for warning in told if "gets nothing" in str(warning.message)]
    assert len(messages) == 1
    assert re.search(f"the saved-tensor hooks of .*{name}.*{line}", messages[0])
    offload.close()


DIFFERENT = r"two offloaders with different settings on one Linear: it is {} already.*{}"


def test_a_context_inside_another_with_other_settings_is_an_error(scratch: Path) -> None:
    model, settings = nn.Linear(4, 4), {"storage_paths": scratch, "min_tensor_bytes": 0}
    outer = offload_context(model, "nvme", **settings)
    asked = r"compress='exact' instead of None, checksum=True instead of False"
    with outer:
        model(torch.randn(2, 4)).sum().backward()
        inner = offload_context(model, "nvme", compress="exact", checksum=True, **settings)
        with pytest.raises(ConfigError, match=DIFFERENT.format("entered", f"{asked}.*Write compress=None, check")):
            inner.__enter__()
        with offload_context(model, "nvme", **settings) as same:
            assert same is outer
        with offload_context(nn.Linear(4, 4), "keep"), offload_context(None, "keep"):
            pass
    with offload_context(model, "keep"):  # not inside
        pass
    assert _pairs_on_the_stack() == 0
    outer.close()


def test_a_context_of_an_attached_model_with_other_settings_is_an_error(scratch: Path) -> None:
    model = nn.Linear(4, 4)
    attached = attach(model, "nvme", storage_paths=scratch)
    keep = offload_context(model, "keep", storage_paths=scratch)
    with keep:
        with pytest.raises(ConfigError, match=DIFFERENT.format("entered", "tier='nvme' instead of 'keep'")):
            model(torch.randn(2, 4))
        with pytest.raises(ConfigError, match=DIFFERENT.format("attached", "tier='auto' instead of 'nvme'")):
            attach(model, "auto", storage_paths=scratch)
        attached.close()
        with pytest.raises(ConfigError, match=DIFFERENT.format("entered", "leave that one first")):
            attach(model, "auto", storage_paths=scratch)
        model(torch.randn(2, 4)).sum().backward()
    assert _pairs_on_the_stack() == 0


def test_a_context_after_an_interrupted_forward_is_no_second_one(attached: Attach) -> None:
    model = Interrupted()
    offload = attached(model)
    _interrupt(model)
    offload.close()
    with offload_context(model, "keep"):
        model(torch.randn(2, 8)).sum().backward()
    assert _pairs_on_the_stack() == 0


def test_an_offloader_of_ours_inside_another_is_named(scratch: Path, attached: Attach) -> None:
    body = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    model = nn.Sequential(body)
    outer = offload_context(model, "nvme", storage_paths=scratch, min_tensor_bytes=0)
    attached(body)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(4):
            with outer:
                model(torch.randn(8, 64)).sum().backward()
    messages = [str(warning.message) for warning in told]
    assert len([message for message in messages if "keep one `offload_context` or `attach`" in message]) == 1
    outer.close()


@pytest.mark.parametrize("line", ["trl.models.activation_offloading.OffloadActivations", "torchtune.training.X"])
def test_a_known_offloader_comes_with_the_line_to_delete(line: str) -> None:
    assert line_to_delete(line).startswith("delete ")


@pytest.mark.parametrize("tier", ["nvme", "auto", "keep"])
def test_training_that_never_calls_the_attached_model_is_told_once(tier: str, attached: Attach) -> None:
    inner = nn.Linear(8, 8)
    attached(inner, tier)
    model = Made(lambda self, x: self.inner.forward(x), inner=inner)  # past its hooks
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()  # before there are gradients, as some do to quieten a scheduler
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(4):
            model(torch.randn(2, 8)).sum().backward()
            optimizer.step()
    messages = [str(warning.message) for warning in told]
    assert len(messages) == (tier != "keep")
    assert all(re.search("parameters of the attached Linear, but nothing.*Write attach", each) for each in messages)


def test_nothing_is_told_of_models_that_are_called_or_not_trained(attached: Attach) -> None:
    models = [nn.Linear(8, 8) for _ in range(3)]
    for model in models[:2]:
        attached(model)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    models[0](torch.randn(2, 8)).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            models[2](torch.randn(2, 8)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()


def test_a_context_that_is_never_entered_is_told_once_at_the_end() -> None:
    program = """
import gc, torch, tba
from contextlib import nullcontext

def made(name, **settings):
    model = type(name, (torch.nn.Linear,), {})(8, 8)
    return model, tba.offload_context(model, **settings), torch.optim.SGD(model.parameters(), lr=0.1)

def train(model, optimizer=None, context=nullcontext()):
    for _ in range(4):
        with context:
            model(torch.randn(2, 8)).sum().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

def within_a_function():
    model, offload, optimizer = made("Wrong")
    train(model, optimizer)
    assert offload.stats().verdict == "nothing saved yet: the context was not entered"
    offload.close()

within_a_function()
by_hand, by_hand_too, _ = made("ByHand")
train(by_hand)

untrained, context, _ = made("Untrained")
untrained(torch.randn(2, 8)).sum()
model, closed, optimizer = made("Closed")
closed.close()
train(model, optimizer)
model, used, optimizer = made("AfterPlainSteps")
train(model, optimizer)
train(model, optimizer, used)
beside, other, optimizer = made("BesideAnother", checksum=True)
first = tba.offload_context(beside)
train(beside, optimizer, first)
first.close()
del first
gc.collect()
train(beside, optimizer)
attached, _, optimizer = made("Attached", checksum=True)
tba.attach(attached)
train(attached, optimizer)
gc.collect()
print("trained")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout == "trained\n"
    pattern = r"the (\w+) was trained, and .* `with offload_context\(model, \.\.\.\):` .* attach\(model, \.\.\.\)"
    assert re.findall(pattern, ended.stderr) == ["Wrong", "ByHand"], ended.stderr
    assert ended.stderr.count("OffloadWarning: tier='auto' gets nothing") == 2, ended.stderr


def test_plain_steps_before_a_context_is_entered_are_no_error() -> None:
    model = nn.Linear(8, 8)
    offload, optimizer = offload_context(model), torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for context in (nullcontext(), nullcontext(), nullcontext(), offload):
            with context:
                model(torch.randn(2, 8)).sum().backward()
            optimizer.step()
    offload.close()


def test_checkpointing_is_no_foreign_pair(scratch: Path, recwarn: pytest.WarningsRecorder) -> None:
    layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
    model = Made(lambda self, x: checkpoint(self.layers, x, use_reentrant=False).sum(), layers=layers)
    with offload_context(model, "nvme", storage_paths=scratch, min_tensor_bytes=0) as offload:
        model(torch.randn(8, 64, requires_grad=True)).backward()
    assert not [str(w.message) for w in recwarn.list if "gets nothing" in str(w.message)]
    offload.close()
