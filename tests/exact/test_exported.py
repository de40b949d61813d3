"""An attached model is exported, traced and scripted as it is without, and stays attached."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.exactness import assert_bit_equal
from support.models import Around, RMSNorm
from tba import attach, offload_context

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec:FutureWarning"),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = RMSNorm(64)
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.b(torch.relu(self.a(self.norm(x)))) * scale


def _compiled(model: nn.Module, x: Tensor) -> Any:
    torch.compiler.reset()
    return torch.compile(model, backend="eager")


WAYS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "export, strict": lambda model, x: torch.export.export(model, (x,), strict=True).module(),
    "export": lambda model, x: torch.export.export(model, (x,)).module(),
    "trace": lambda model, x: torch.jit.trace(model, (x,)),
    "script": lambda model, x: torch.jit.script(model),
    "fx": lambda model, x: torch.fx.symbolic_trace(model),
    "compile": _compiled,
    "copy": lambda model, x: copy.deepcopy(model),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "nvme": {"tier": "nvme"},
    "auto": {"tier": "auto"},
    "budget": {"tier": "auto", "memory_budget": "64KiB"},
    "exact": {"tier": "nvme", "compress": "exact"},
    "lossy": {"tier": "keep", "compress": "safe8"},
}


def step(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    model.zero_grad()
    model(x).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


# A graph around an attached model breaks, and PyTorch warns as it looks at what is no leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("inside", [False, True], ids=["itself", "in another"])
def test_an_attached_model_is_exported_as_without(way: str, settings: str, inside: bool, scratch: Path) -> None:
    if (way, settings) == ("trace", "lossy"):
        pytest.skip("the tracer's second look finds the names of other modules")
    x, plain = torch.randn(200, 64), Net()
    model = Net()
    whole: nn.Module = Around(model) if inside else model
    wanted = (Around(plain) if inside else plain)(x)
    offload = attach(model, min_tensor_bytes=0, storage_paths=scratch, **SETTINGS[settings])
    try:
        for _ in range(3):
            step(model, x)
        before = offload.stats().saved_bytes
        made = WAYS[way](whole, x)
        assert_bit_equal(made(x), wanted)
        if way not in ("fx", "compile"):  # these run the model, or what the context is entered around
            assert "tba" not in str(getattr(made, "code", ""))
        gradients = step(model, x)  # attached as before
        if settings != "auto":  # whose hooks are off by now
            assert offload.stats().saved_bytes > before
        if settings != "lossy":
            assert_bit_equal(gradients, step(plain, x))
    finally:
        offload.close()
    assert_bit_equal(WAYS[way](whole, x)(x), wanted)
    torch.compiler.reset()


@pytest.mark.parametrize("way", ["export, strict", "export", "trace", "script"])
def test_a_model_is_exported_inside_of_a_context(way: str, scratch: Path) -> None:
    x = torch.randn(200, 64)
    model = Net()
    with offload_context(model, "auto", min_tensor_bytes=0, storage_paths=scratch, memory_budget="1GiB") as offload:
        assert_bit_equal(WAYS[way](model, x)(x), Net()(x))
        model(x).sum().backward()
    assert offload.stats().saved_bytes > 0
    offload.close()


def test_hooks_of_others_stay_where_they_were(scratch: Path) -> None:
    calls: list[str] = []

    model = Net()
    model.register_forward_pre_hook(lambda *_: calls.append("first"))
    offload = attach(model, "keep", min_tensor_bytes=0)
    model.register_forward_pre_hook(lambda *_: calls.append("last"))
    order = [list(model._forward_pre_hooks), list(model._forward_hooks)]
    with pytest.raises(Exception, match="single top-level function"):  # TorchScript cannot compile their last one
        torch.jit.script(model)
    assert [list(model._forward_pre_hooks), list(model._forward_hooks)] == order
    step(model, torch.randn(8, 64))
    assert calls == ["first", "last"]
    assert offload.stats().saved_bytes > 0
    offload.close()


def test_a_torch_that_compiles_hooks_otherwise_says_close(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.jit._recursive, "create_script_module", torch.jit._recursive.create_script_module.__wrapped__
    )
    model = Net()
    offload = attach(model, "keep", min_tensor_bytes=0)
    with pytest.raises(AttributeError, match=r"call close\(\) on what `attach` returned"):
        torch.jit.script(model)
    offload.close()
    assert torch.jit.script(model)(torch.ones(2, 64)).shape == (2, 64)
