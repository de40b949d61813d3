"""What a derivation, or a lossy codec, may not be trusted with: edited, gathered, cancelling, masking tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from support.engine import engine
from support.exactness import assert_bit_equal, equal
from support.models import Made, RMSNorm
from tba import Offloader

Step = Callable[[nn.Module, int, Callable[[], None]], Tensor]


def nothing() -> None:
    """In the place of `flush`."""


def plain_gradients(model: nn.Module, step: Step, steps: int = 2) -> list[list[Tensor]]:
    """Of all parameters, by step."""
    found = []
    for number in range(steps):
        torch.manual_seed(number)
        model.zero_grad()
        step(model, number, nothing).backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    return found


def gradients(offload: Offloader, model: nn.Module, step: Step, steps: int = 2) -> list[list[Tensor]]:
    found = []
    for number in range(steps):
        torch.manual_seed(number)
        model.zero_grad()
        with offload:
            loss = step(model, number, offload.flush)
        loss.backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    return found


def off(mine: Tensor, wanted: Tensor) -> float:
    return float((mine - wanted).norm() / wanted.norm())


def linear(inputs: int = 64, outputs: int = 64) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs)


def edited_after_it_was_saved(model: nn.Module, number: int, flush: Callable[[], None]) -> Tensor:
    h = model(torch.randn(32, 64)).bfloat16().float()  # of halves, which the codec makes smaller at once
    branch = h.pow(3).sin()  # saves h; nobody asks for its gradient
    flush()
    if number:
        with torch.no_grad():
            h.mul_(2)
    return (-h).sin().sin().sin().sum() + branch.detach().sum()


@pytest.mark.parametrize("settings", [{"prefetch_bytes": 0}, {"tier": "keep"}], ids=["nvme", "keep"])
@pytest.mark.parametrize("compress", ["exact", "safe8"])
def test_an_operand_edited_after_it_was_saved(scratch: Path, settings: dict[str, Any], compress: str) -> None:
    model = linear()
    expected = plain_gradients(model, edited_after_it_was_saved)
    with engine(scratch, model=model, compress=compress, **settings) as offload:
        found = gradients(offload, model, edited_after_it_was_saved)
    for mine, wanted in zip(found, expected, strict=True):
        assert max(map(off, mine, wanted)) <= (0 if compress == "exact" else 0.02)


def test_a_result_edited_after_its_node_saved_it(scratch: Path) -> None:
    """PyTorch refuses backward through that node; here only what follows from the edited tensor is asked for."""

    def run(flush: Callable[[], None]) -> list[Tensor]:
        found = []
        for number in range(2):
            torch.manual_seed(number)
            h = torch.randn(32, 64, requires_grad=True).tanh()
            flush()
            if number:
                with torch.no_grad():
                    h.mul_(2)
            y = (-h).sin().sin()
            flush()
            found.append(torch.autograd.grad(y.sum(), h)[0])
        return found

    expected = run(nothing)
    with engine(scratch, compress="exact", prefetch_bytes=0) as offload:
        with offload:
            found = run(offload.flush)
        assert offload.stats().derived_bytes
    assert equal(found, expected)


def test_an_operand_of_another_dtype_is_another_recipe(scratch: Path) -> None:
    def step(model: nn.Module, number: int, flush: Callable[[], None]) -> Tensor:
        x = model(torch.randn(32, 64))
        branch = x.sin().sum()
        mask = (torch.rand(32, 64) > 0.5).to(torch.float64 if number else torch.float32)
        y = (x * 1.5).mul_(mask)
        return (-y).sin().sin().sin().sum() + branch

    model = linear()
    expected = plain_gradients(model, step)
    with engine(scratch, model=model, compress="exact", tier="keep") as offload:
        found = gradients(offload, model, step)
    assert all(map(equal, found, expected))


@pytest.mark.parametrize("eps", [1e-15, 2e-5])
def test_an_eps_that_large_values_had_swallowed(scratch: Path, eps: float) -> None:
    model = nn.Sequential(linear(), nn.LayerNorm(64, eps=eps))
    nn.init.zeros_(model[0].bias)

    def step(model: nn.Module, number: int, flush: Callable[[], None]) -> Tensor:
        rows = torch.randn(32, 64) * (1e-4 if number else 1e3)
        return model(rows).sin().sin().sum()

    expected = plain_gradients(model, step)
    with engine(scratch, model=model, compress="exact", prefetch_bytes=0) as offload:
        found = gradients(offload, model, step)
    assert all(map(equal, found, expected))


@pytest.mark.parametrize("compress", ["safe8", "balanced"])
def test_a_difference_of_lossy_tensors_that_have_come_to_agree(scratch: Path, compress: str) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(64, 256), nn.Linear(64, 256), nn.Linear(256, 64)])

    def step(model: Any, number: int, flush: Callable[[], None]) -> Tensor:
        x, (one, other, last) = torch.randn(128, 64), model
        if number:
            with torch.no_grad():
                other.weight.copy_(one.weight + 1e-3 * torch.randn_like(one.weight))
                other.bias.copy_(one.bias)
        a, b = one(x), other(x)
        branch = (functional.gelu(a) + functional.gelu(b)).sum()
        loss: Tensor = last(a - b).pow(2).sum() + branch
        return loss

    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = plain_gradients(model, step)
    model.load_state_dict(before)
    with engine(scratch, model=model, compress=compress, tier="keep") as offload:
        found = gradients(offload, model, step)
    for mine, wanted in zip(found, expected, strict=True):
        assert off(mine[4], wanted[4]) < (0.02 if compress == "safe8" else 0.25)  # of the last layer's weight


@pytest.mark.parametrize("compress", ["safe8", "balanced", "max"])
def test_a_mask_of_numbers_masks(scratch: Path, compress: str) -> None:
    def step(model: nn.Module, number: int, flush: Callable[[], None]) -> Tensor:
        kept = (torch.rand(256, 64) > 0.3).float()
        target = torch.where(kept > 0, torch.randn(256, 64), torch.tensor(-9999.0))
        return ((model(torch.randn(256, 64)) - target) ** 2 * kept).sum() / kept.sum()

    model = linear()
    expected = plain_gradients(model, step)
    with engine(scratch, model=model, compress=compress, tier="keep") as offload:
        found = gradients(offload, model, step)
    for mine, wanted in zip(found, expected, strict=True):
        assert max(map(off, mine, wanted)) < {"safe8": 0.02, "balanced": 0.25, "max": 0.7}[compress]


class LogNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x.abs() + 1e-5).log()


@pytest.mark.parametrize("compress", ["safe8", "max"])
def test_what_a_norm_is_not_made_of_is_exact(scratch: Path, compress: str) -> None:
    model = nn.Sequential(linear(), LogNorm())

    def step(model: nn.Module, number: int, flush: Callable[[], None]) -> Tensor:
        return model(torch.randn(64, 64)).sum()

    expected = plain_gradients(model, step)
    with engine(scratch, model=model, compress=compress, tier="keep") as offload:
        found = gradients(offload, model, step)
    for mine, wanted in zip(found, expected, strict=True):
        assert_bit_equal(mine[1], wanted[1])  # the bias: all that came through the norm


def _nested(norm: nn.Module) -> nn.Module:
    """A block between two layers, which returns what its norm makes, besides."""

    def block(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.norm(x)
        return x + functional.gelu(self.layer(h)), h

    def nested(self: Any, x: Tensor) -> Tensor:
        out, h = self.block(self.first(x))
        return self.last(out).sum() + self.last(h).pow(2).sum()  # type: ignore[no-any-return]

    first, last = nn.Linear(32, 32), nn.Linear(32, 1)
    return Made(nested, first=first, block=Made(block, norm=norm, layer=nn.Linear(32, 32)), last=last)


@pytest.mark.parametrize("norm", [nn.LayerNorm, RMSNorm])
@pytest.mark.parametrize("alone", [False, True], ids=["block", "each norm"])
def test_weights_that_are_gathered_for_a_while(scratch: Path, tmp_path: Path, norm: Any, alone: bool) -> None:
    dist = pytest.importorskip("torch.distributed")
    if not dist.is_available():
        pytest.skip("torch was built without distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    plain, model = _nested(norm(32)), _nested(norm(32))
    model.load_state_dict(plain.state_dict())
    x = torch.randn(64, 32)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for whole in (plain, model):
            for module in (whole.block.norm if alone else whole.block, whole):
                fully_shard(module, mesh=mesh)
        with engine(scratch, model=model, compress="exact", tier="keep") as offload:
            for _ in range(2):
                with offload:
                    loss = model(x)
                loss.backward()
                plain(x).backward()
                for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                    assert mine.grad is not None
                    assert theirs.grad is not None
                    assert_bit_equal(mine.grad.full_tensor(), theirs.grad.full_tensor())  # type: ignore[attr-defined]
    finally:
        dist.destroy_process_group()
