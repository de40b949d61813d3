"""Training on the accelerator: launched ahead, with the bits of the last time, and with those of the CPU's kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from support import accelerator
from support.gpt import GPT, GPTConfig

VOCABULARY, WIDTH, LENGTH = 61, 32, 16


class Words(nn.Module):
    """A small GPT and its loss."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        sizes = {"layers": 2, "width": WIDTH, "heads": 4, "sequence": LENGTH, "vocab": VOCABULARY}
        self.gpt = GPT(GPTConfig(**sizes, dropout=dropout))

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.gpt(ids, ids.roll(-1, 1))
        return loss


class Pictures(nn.Module):
    """Convolutions, batch normalisation and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.ConvTranspose2d(8, 4, 2, stride=2, groups=2), nn.GroupNorm(2, 4), nn.SiLU(), nn.AdaptiveAvgPool2d(1)),
        )
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.head(self.body(x).flatten(1)), x.mean((2, 3)).repeat(1, 2)[:, :5])


def words() -> Tensor:
    return torch.randint(0, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(1))


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def train(make: Callable[[], nn.Module], batch: Tensor, device: str, steps: int = 3) -> list[Tensor]:
    """Train anew; the losses, the gradients of the last step, parameters and buffers."""
    torch.manual_seed(0)
    model = make().to(device)
    batch = batch.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    with sdpa_kernel(SDPBackend.MATH):
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    gradients = [parameter.grad for parameter in model.parameters()]
    found = [*losses, *gradients, *model.parameters(), *model.buffers()]
    return [tensor.detach().cpu() for tensor in found if tensor is not None]


def different(some: list[Tensor], others: list[Tensor]) -> int:
    return sum(not torch.equal(one, other) for one, other in zip(some, others, strict=True))


CASES = {
    "words": (Words, words()),
    "pictures": (Pictures, numbers(2, 3, 8, 8)),
}


@pytest.mark.parametrize("name", CASES)
def test_training_gives_the_cpu_s_bits(sim: ModuleType, name: str) -> None:
    make, batch = CASES[name]
    assert different(train(make, batch, "sim"), train(make, batch, "cpu")) == 0


@pytest.mark.parametrize("name", CASES)
def test_training_gives_the_same_bits_however_streams_are_delayed(sim: ModuleType, name: str) -> None:
    make, batch = CASES[name]
    expected = train(make, batch, "sim")
    for seed in range(2):
        accelerator.configure(delay_s=0.0005, seed=seed)
        assert different(train(make, batch, "sim"), expected) == 0


SEEN: list[int] = []


@torch.library.custom_op("accelerator_tests::doubled", mutates_args=(), device_types="cpu")
def doubled(x: Tensor) -> Tensor:
    SEEN.append(threading.get_ident())
    return x * 2


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_a_kernel_in_python_runs_while_the_host_waits(sim: ModuleType) -> None:
    SEEN.clear()
    stream = sim.current_stream()
    x = torch.ones(8, device="sim")
    with sim.held(stream):
        y = doubled(doubled(x))
        assert SEEN == []
    stream.synchronize()
    assert len(SEEN) == 2
    assert threading.get_ident() not in SEEN
    assert y.tolist() == [4.0] * 8


def test_a_step_is_launched_before_any_of_its_kernels_runs(sim: ModuleType) -> None:
    model, ids = Words().to("sim"), words().to("sim")
    stream = sim.current_stream()
    passed = sim.Event()
    with sim.held(stream), sdpa_kernel(SDPBackend.MATH):
        passed.record()
        model(ids).backward()
        assert not passed.query()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with sdpa_kernel(SDPBackend.MATH):
        model(ids).backward()
    assert different([g.cpu() for g in gradients], [p.grad.cpu() for p in model.parameters()]) == 0


def test_the_kernels_of_a_step_are_queued(sim: ModuleType) -> None:
    before = sim.launches()
    train(Words, words(), "sim", 1)
    at_once = {name for name, count in sim.launches().items() if count.at_once != before.get(name, (0, 0))[1]}
    assert at_once == set()


def test_backward_runs_on_a_thread_of_the_device(sim: ModuleType) -> None:
    seen = []
    for device in ("sim", "sim:1"):
        y = torch.ones(3, device=device, requires_grad=True) * 2
        y.register_hook(lambda grad: seen.append((threading.get_ident(), sim.current_device())))
        y.sum().backward()
    (one, first), (other, second) = seen
    assert len({one, other, threading.get_ident()}) == 3
    assert (first, second) == (0, 1)


def test_backward_runs_on_the_stream_of_its_forward(sim: ModuleType) -> None:
    seen = []
    side = sim.Stream()
    x = torch.ones(3, device="sim", requires_grad=True)
    side.wait_stream(sim.current_stream())
    with sim.stream(side):
        y = x * 2
    y.register_hook(lambda grad: seen.append(sim.current_stream()))
    y.sum().backward()
    assert seen == [side]
    assert x.grad is not None
    assert x.grad.tolist() == [2.0] * 3


def test_dropout_draws_the_same_after_the_same_seed(sim: ModuleType) -> None:
    def make() -> nn.Module:
        return Words(dropout=0.3)

    expected = train(make, words(), "sim")
    accelerator.configure(delay_s=0.0005, seed=3)
    assert different(train(make, words(), "sim"), expected) == 0
    assert different(train(Words, words(), "sim"), expected) > 0


@pytest.mark.parametrize(
    "operate",
    [
        lambda x: torch.view_as_complex(x).log_softmax(-1),
        lambda x: x @ x.half(),
        lambda x: torch.view_as_complex(x).atan2(torch.view_as_complex(x)),
        lambda x: x[0].expand(2, 2).copy_(x),
    ],
    ids=["no such type", "two types", "no such type of two", "one place twice"],
)
def test_an_operator_that_the_kernel_refuses_raises_where_it_is_called(
    sim: ModuleType, operate: Callable[[Tensor], Tensor]
) -> None:
    x = torch.ones(2, 2)
    with pytest.raises(RuntimeError) as expected:
        operate(x)
    with pytest.raises(RuntimeError) as found:
        operate(x.to("sim"))
    assert str(found.value) == str(expected.value)
    sim.synchronize()
