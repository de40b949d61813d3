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
from torch.utils.checkpoint import checkpoint

from support import accelerator

VOCABULARY, WIDTH, LENGTH = 61, 32, 16


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.before, self.within = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (t.view(batch, length, 4, -1).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.dropout(self.out(seen))
        return x + self.dropout(self.down(F.gelu(self.up(self.within(x)))))


class Words(nn.Module):
    """A small GPT."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(Block(dropout), Block(dropout))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.blocks(self.embed(ids)))
        return F.cross_entropy(logits.view(-1, VOCABULARY), ids.roll(-1, 1).view(-1))


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


class Sequence(nn.Module):
    """An LSTM and a GRU cell's worth of gates."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 16, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0].square().mean()


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
    "sequence": (Sequence, numbers(2, 5, WIDTH)),
}


@pytest.mark.parametrize("name", ["words", "pictures"])
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


def test_shapes_that_are_known_are_not_taken_for_others(sim: ModuleType) -> None:
    for _ in range(2):
        x = torch.arange(6, device="sim")
        assert (x + 1).dtype is torch.int64
        assert (x + 1.5).dtype is torch.float32
        assert (x + x.float().mean()).dtype is torch.float32
        assert (x + torch.tensor(1.5)).dtype is torch.float32
        assert (x.view(2, 3).sum(0).shape, x.view(2, 3).sum(1).shape) == ((3,), (2,))
        assert (x.view(2, 3).t() + 1).stride() == (1, 3)
        out = torch.empty(0, dtype=torch.int64, device="sim")
        assert torch.add(x, 1, out=out) is out
        assert out.tolist() == [1, 2, 3, 4, 5, 6]
        assert x.add_(x).tolist() == [0, 2, 4, 6, 8, 10]


def test_integers_are_counted_in_bins(sim: ModuleType) -> None:
    bins = torch.tensor([0, 3, 3, 1], dtype=torch.int32, device="sim").histc(4, 0, 3)
    assert (bins.dtype, bins.tolist()) == (torch.int32, [1, 1, 0, 2])


def test_an_lstm_is_near_the_cpu_s(sim: ModuleType) -> None:
    make, batch = CASES["sequence"]
    for one, other in zip(train(make, batch, "sim", 1), train(make, batch, "cpu", 1), strict=True):
        torch.testing.assert_close(one, other)


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
    x = torch.ones(3, device="sim", requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append((threading.get_ident(), sim.current_device())))
    y.sum().backward()
    x = torch.ones(3, device="sim:1", requires_grad=True)
    y = x * 2
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


def test_the_state_of_a_generator_comes_back(sim: ModuleType) -> None:
    sim.manual_seed_all(5)
    state = sim.get_rng_state()
    first = torch.rand(100, device="sim")
    second = torch.rand(100, device="sim")
    sim.set_rng_state(state)
    assert torch.equal(torch.rand(100, device="sim").cpu(), first.cpu())
    assert not torch.equal(first.cpu(), second.cpu())
    assert sim.initial_seed() == 5
    own = torch.Generator(device="sim").manual_seed(5)
    assert torch.equal(torch.rand(100, device="sim", generator=own).cpu(), first.cpu())
    assert torch.equal(
        torch.empty(100, device="sim").bernoulli_(0.5, generator=own).cpu().unique(), torch.tensor([0.0, 1.0])
    )


def test_a_checkpoint_draws_again_what_it_drew(sim: ModuleType) -> None:
    block, x = Block(0.5).to("sim"), numbers(2, LENGTH, WIDTH).to("sim")
    sim.manual_seed_all(1)
    plain = block(x).sum()
    expected = torch.autograd.grad(plain, list(block.parameters()))
    sim.manual_seed_all(1)
    again = checkpoint(block, x, use_reentrant=False).sum()
    assert (
        different([g.cpu() for g in torch.autograd.grad(again, list(block.parameters()))], [g.cpu() for g in expected])
        == 0
    )


def test_autocast_runs_products_in_lower_precision(sim: ModuleType) -> None:
    linear, x = nn.Linear(8, 8).to("sim"), numbers(4, 8).to("sim")
    with torch.autocast("sim", dtype=torch.bfloat16):
        product = linear(x)
        total = F.mse_loss(product, x)
    assert (product.dtype, total.dtype) == (torch.bfloat16, torch.float32)
    total.backward()
    assert linear.weight.grad is not None
    assert linear.weight.grad.dtype is torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = linear.cpu()(x.cpu())
    assert torch.equal(product.cpu(), expected)


def test_gradients_are_scaled_and_unscaled(sim: ModuleType) -> None:
    linear, x = nn.Linear(8, 8).to("sim"), numbers(4, 8).to("sim")
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("sim", init_scale=4.0)
    before = linear.weight.detach().cpu()
    scaler.scale(linear(x).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert not torch.equal(linear.weight.detach().cpu(), before)


@pytest.mark.parametrize(
    ("name", "run"),
    {
        "nonzero": lambda x: x.round().nonzero(),
        "masked_select": lambda x: x[x > 0],
        "unique": lambda x: x.round().unique(),
        "topk": lambda x: x.flatten().topk(3)[0],
        "sort": lambda x: x.sort(-1)[1],
        "cumsum": lambda x: x.cumsum(0),
        "index_put": lambda x: x.index_put((torch.tensor([0, 2], device=x.device),), x[:2]),
        "scatter": lambda x: x.scatter(0, torch.zeros_like(x, dtype=torch.long), 1.0),
        "mask_fill": lambda x: x.masked_fill(x > 0, 2.0),
        "split": lambda x: torch.stack(x.split(2)),
        "unfold": lambda x: x.unfold(0, 2, 1).sum(-1),
        "complex": lambda x: torch.view_as_real(torch.fft.fft(x)),
        "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
        "linalg": lambda x: torch.linalg.inv(x[:, :4] + 9 * torch.eye(4, device=x.device)),
        "bf16": lambda x: (x.bfloat16() @ x.bfloat16().t()).float(),
        "arange": lambda x: torch.arange(3, device=x.device) + x[:, :3],
        "cat": lambda x: torch.cat([x, x.double()]),
        "embedding_bag": lambda x: F.embedding_bag(torch.arange(4, device=x.device).view(2, 2), x),
        "interpolate": lambda x: F.interpolate(x[None, None], scale_factor=2.0, mode="bilinear"),
        "histogram": lambda x: x.mul(3).histc(4, -6, 6),
        "foreach": lambda x: torch._foreach_add([x, x], 1.0),
        "out": lambda x: torch.add(x, 1.0, out=torch.empty(0, device=x.device)),
    }.items(),
)
def test_an_operator_gives_the_cpu_s_bits(sim: ModuleType, name: str, run: Callable[[Tensor], Tensor]) -> None:
    x = numbers(4, 6)
    found, expected = run(x.to("sim")), run(x)
    if isinstance(found, Tensor):
        found, expected = [found], [expected]
    assert different([tensor.cpu() for tensor in found], list(expected)) == 0
