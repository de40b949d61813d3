"""compact.CompActAdamW: the paper's algorithm step by step, resumed to the last bit, and its mended defects."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compact import CheckpointError, CompActAdamW, Projection, clip_grad_norm_, convert, key
from compact._training.moments import carry

BETAS, EPS = (0.9, 0.95), 1e-8


def _model(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(24, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 6)).to(dtype)


def _batches(count: int, dtype: torch.dtype = torch.float64, size: int = 10) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(9)
    for _ in range(count):
        yield (
            torch.randn(size, 24, generator=generator, dtype=torch.float64).to(dtype),
            torch.randn(size, 6, generator=generator, dtype=torch.float64).to(dtype),
        )


def _train(model: nn.Module, optimizer: CompActAdamW, batches: Iterator[tuple[Tensor, Tensor]]) -> list[float]:
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _converted(dtype: torch.dtype = torch.float64, rank: int = 6, **settings: Any) -> tuple[Any, CompActAdamW]:
    model = _model(dtype)
    convert(model, rank=rank, skip=(), **settings)
    return model, CompActAdamW(model.parameters())


def _space(weight: Tensor) -> Any:
    return weight.subspace  # type: ignore[attr-defined]


class _Paper:
    """The algorithm of arXiv 2410.15352, section 3, for one layer o = x W, in float64, with W as [n, m]."""

    def __init__(self, weight: Tensor, name: str, rank: int, alpha: float, period: int, seed: int) -> None:
        self.w = weight.detach().t().clone()
        self.name, self.rank, self.alpha, self.period = name, rank, alpha, period
        self.seed, self.s, self.t = seed, 0, 0
        self.m = self.v = torch.zeros(rank, self.w.shape[1], dtype=torch.float64)

    def p(self) -> Tensor:
        base = key(self.seed, self.name, "layer")
        return Projection("gaussian", len(self.w), self.rank, key(base, self.s)).matrix(torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        self.z = x @ self.p()  # all that is kept of x
        return x @ self.w

    def backward(self, d: Tensor) -> Tensor:
        self.g = self.z.t() @ d  # r x m
        return d @ self.w.t()

    def step(self, lr: float) -> None:
        self.t += 1
        self.m = BETAS[0] * self.m + (1 - BETAS[0]) * self.g
        self.v = BETAS[1] * self.v + (1 - BETAS[1]) * self.g**2
        m_hat, v_hat = self.m / (1 - BETAS[0] ** self.t), self.v / (1 - BETAS[1] ** self.t)
        n = m_hat / (v_hat.sqrt() + EPS)
        self.w = self.w - lr * self.alpha * (self.p() @ n)
        if self.t % self.period == 0:
            self.s += 1


def test_every_step_is_that_of_the_paper() -> None:
    rank, alpha, period, seed, lr = 6, 0.25, 3, 11, 0.02
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 32, bias=False), nn.Tanh(), nn.Linear(32, 6, bias=False)).double()
    first, second = (
        _Paper(layer.weight, name, rank, alpha, period, seed)
        for name, layer in model.named_children()
        if isinstance(layer, nn.Linear)
    )
    convert(model, rank=rank, refresh=period, alpha=alpha, seed=seed, skip=())
    optimizer = CompActAdamW(model.parameters(), lr=lr, betas=BETAS, eps=EPS)
    for x, y in _batches(10):
        optimizer.zero_grad()
        out = model(x)
        (out - y).square().sum().backward()
        # The reference, by hand.
        hidden = torch.tanh(first.forward(x))
        wanted = second.forward(hidden)
        torch.testing.assert_close(out, wanted, rtol=1e-9, atol=1e-11)
        d_hidden = second.backward(2 * (wanted - y))
        first.backward(d_hidden * (1 - hidden**2))
        for reference, index in ((first, 0), (second, 2)):
            weight = model[index].weight
            assert weight.grad is None
            torch.testing.assert_close(_space(weight).grad, reference.g.t(), rtol=1e-8, atol=1e-10)
        optimizer.step()
        for reference, index in ((first, 0), (second, 2)):
            reference.step(lr)
            weight = model[index].weight
            torch.testing.assert_close(weight.detach(), reference.w.t(), rtol=1e-8, atol=1e-10)
            state = optimizer.state[weight]
            torch.testing.assert_close(state["exp_avg"], reference.m.t(), rtol=1e-8, atol=1e-10)
            torch.testing.assert_close(state["exp_avg_sq"], reference.v.t(), rtol=1e-8, atol=1e-10)
            assert _space(weight).refreshes == reference.s
    assert first.s == 3


def test_gradients_and_moments_are_as_small_as_the_rank() -> None:
    model, optimizer = _converted(torch.float32, rank=4)
    _train(model, optimizer, _batches(1, torch.float32))
    model(torch.ones(2, 24)).sum().backward()
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        wanted = (len(parameter), 4) if parameter.dim() == 2 else parameter.shape
        assert state["exp_avg"].shape == state["exp_avg_sq"].shape == torch.Size(wanted), name
        assert (parameter.grad is None) == (parameter.dim() == 2)
        if parameter.dim() == 2:
            assert _space(parameter).grad.shape == (len(parameter), 4)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_parameters_get_torch_s_adamw_to_the_last_bit(weight_decay: float, dtype: torch.dtype) -> None:
    settings = {"lr": 0.003, "betas": BETAS, "eps": EPS, "weight_decay": weight_decay}
    ours, theirs = _model(dtype), _model(dtype)
    optimizers = CompActAdamW(ours.parameters(), **settings), torch.optim.AdamW(theirs.parameters(), **settings)
    for model, optimizer in zip((ours, theirs), optimizers, strict=True):
        _train(model, optimizer, _batches(6, dtype))  # type: ignore[arg-type]
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_full_orthonormal_rank_without_refresh_is_adam_in_another_basis() -> None:
    model = nn.Linear(32, 8, bias=False).double()
    before = model.weight.detach().clone()
    convert(model, rank=32, kind="orthonormal", refresh=None, alpha=0.5, skip=())
    optimizer = CompActAdamW(model.parameters(), lr=0.1, weight_decay=0.2)
    x = torch.randn(50, 32, dtype=torch.float64)
    model(x).square().sum().backward()
    gradient = (2 * x @ before.t()).t() @ x
    p = _space(model.weight).projection().matrix(torch.float64)
    optimizer.step()
    # The first step of Adam is the sign of its gradient.
    wanted = before * (1 - 0.1 * 0.2) - 0.1 * 0.5 * (gradient @ p).sign() @ p.t()
    torch.testing.assert_close(model.weight.detach(), wanted)


def test_micro_batches_add_up_and_zero_grad_clears() -> None:
    model, optimizer = _converted()
    (x, _), *_ = _batches(1)
    model(x).square().sum().backward()
    whole = {name: _space(p).grad.clone() for name, p in model.named_parameters() if p.dim() == 2}
    optimizer.zero_grad()
    assert all(_space(p).grad is None for p in model.parameters() if p.dim() == 2)
    for part in x.split(5):
        model(part).square().sum().backward()
    for name, p in model.named_parameters():
        if p.dim() == 2:
            torch.testing.assert_close(_space(p).grad, whole[name])
    optimizer.step()  # clears them too: `model.zero_grad()` knows nothing of them
    assert all(_space(p).grad is None for p in model.parameters() if p.dim() == 2)
    weights = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    optimizer.step()  # nothing to do
    assert all(map(torch.equal, weights, model.parameters()))


def test_clipping_sees_every_gradient() -> None:
    for bound in (0.5, 1e9):
        model = _model()
        convert(model, rank=6, skip=())
        (x, _), *_ = _batches(1)
        model(x).square().sum().backward()
        everything = [_space(p).grad if p.dim() == 2 else p.grad for p in model.parameters()]
        before = [g.clone() for g in everything]
        norm = torch.cat([g.flatten() for g in before]).norm()
        torch.testing.assert_close(clip_grad_norm_(model.parameters(), bound), norm)
        factor = min(1.0, bound / (norm.item() + 1e-6))
        for gradient, old in zip(everything, before, strict=True):
            torch.testing.assert_close(gradient, old * factor)
    model(x * math.nan).sum().backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


def test_clipping_a_plain_model_is_torch_s() -> None:
    ours, theirs = _model(), _model()
    for model in (ours, theirs):
        model(next(_batches(1))[0]).square().sum().backward()
    found = clip_grad_norm_(ours.parameters(), 0.1)
    assert torch.equal(found, torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.1))
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert torch.equal(mine.grad, other.grad)


@pytest.mark.parametrize("at_refresh", ["keep", "carry", "reset"])
@pytest.mark.parametrize("kind", ["gaussian", "orthonormal"])
def test_resumes_to_the_last_bit(at_refresh: str, kind: str) -> None:
    settings: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.01, "at_refresh": at_refresh}

    def new(seed: int) -> tuple[nn.Module, CompActAdamW]:
        model = _model(torch.float32, seed)
        convert(model, rank=6, kind=kind, refresh=2, skip=(), seed=seed)  # type: ignore[arg-type]
        return model, CompActAdamW(model.parameters(), **settings)

    model, optimizer = new(0)
    batches = list(_batches(9, torch.float32))
    _train(model, optimizer, iter(batches[:5]))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    losses = _train(model, optimizer, iter(batches[5:]))
    # Another process would begin like this; even another seed for `convert` is overruled by the checkpoint.
    resumed, resumed_optimizer = new(1)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    resumed.load_state_dict(loaded["model"])
    resumed_optimizer.load_state_dict(loaded["optimizer"])
    assert _train(resumed, resumed_optimizer, iter(batches[5:])) == losses
    for mine, other in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(mine, other)


def _saved(rank: int, kind: str = "gaussian", convert_it: bool = True) -> dict[str, Any]:
    model = _model()
    if convert_it:
        convert(model, rank=rank, kind=kind, skip=())  # type: ignore[arg-type]
    optimizer = CompActAdamW(model.parameters())
    _train(model, optimizer, _batches(2))
    return optimizer.state_dict()


def test_a_checkpoint_that_does_not_fit_names_the_layer_and_the_numbers() -> None:
    model, optimizer = _converted()
    spaces = [copy.deepcopy(_space(p)) for p in model.parameters() if p.dim() == 2]
    cases = [
        (_saved(8), r"layer '0' has rank 6 .*\[32, 6\], but was saved with rank 8 .*\[32, 8\]: convert with rank=8"),
        (_saved(6, "sparse"), r"layer '0' has a gaussian projection, but was saved with a sparse one"),
        (_saved(6, convert_it=False), r"layer '0' is compact with rank 6, but was saved from a plain one .*\[32, 24\]"),
    ]
    for state, message in cases:
        with pytest.raises(CheckpointError, match=message):
            optimizer.load_state_dict(state)
    assert not optimizer.state
    for before, p in zip(spaces, (p for p in model.parameters() if p.dim() == 2), strict=True):
        assert (before.base_key, before.refreshes) == (_space(p).base_key, _space(p).refreshes)
    plain = CompActAdamW(_model().parameters())
    with pytest.raises(CheckpointError, match=r"parameter 0 of shape \[32, 24\] is plain, but .* rank 8"):
        plain.load_state_dict(_saved(8))


def test_what_happens_at_a_refresh() -> None:
    moments = {}
    for at_refresh in ("keep", "carry", "reset"):
        model = _model()
        convert(model, rank=6, refresh=2, skip=())
        optimizer = CompActAdamW(model.parameters(), at_refresh=at_refresh)  # type: ignore[arg-type]
        _train(model, optimizer, _batches(2))
        state = optimizer.state[model[0].weight]
        moments[at_refresh] = state["exp_avg"].clone(), state["exp_avg_sq"].clone()
        assert state["step"] == (0 if at_refresh == "reset" else 2)
        assert _space(model[0].weight).refreshes == 1
        assert torch.isfinite(torch.tensor(_train(model, optimizer, _batches(4)))).all()
        assert _space(model[0].weight).refreshes == 3
    assert not moments["keep"][0].equal(moments["carry"][0])
    old, new = (Projection("gaussian", 24, 6, key(key(0, "0", "layer"), s)) for s in (0, 1))
    carry(*moments["keep"], old, new)
    for wanted, found, nothing in zip(moments["keep"], moments["carry"], moments["reset"], strict=True):
        torch.testing.assert_close(found, wanted)
        assert not nothing.any()
    assert (moments["carry"][1] >= 0).all()


def test_a_gradient_from_before_a_refresh_is_refused() -> None:
    x, _ = next(_batches(1))
    only = nn.Linear(24, 6, bias=False).double()
    convert(only, rank=6, refresh=1, skip=())
    optimizer = CompActAdamW(only.parameters())
    late = only(x).sum()  # the input needs no gradient, so the weight is not saved
    only(x).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"layer '' got a gradient of a forward .* \(it is at refresh 1 now\)"):
        late.backward()


def test_misuse_is_refused() -> None:
    model, optimizer = _converted()
    model[0].weight.sum().backward()  # used outside its layer
    with pytest.raises(
        RuntimeError, match=r"layer '0' has a full gradient of shape \[32, 24\] as well as one of rank 6"
    ):
        optimizer.step()
    optimizer.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(next(_batches(1))[0]).sum()).backward()
    with pytest.raises(RuntimeError, match="GradScaler, which cannot unscale"):
        scaler.step(optimizer)
    for settings, message in (
        ({"lr": -1.0}, "lr is -1"),
        ({"betas": (0.9, 1.0)}, "and below 1"),
        ({"eps": -1.0}, "eps is"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"at_refresh": "rotate"}, "'rotate' is not known"),
    ):
        with pytest.raises(ValueError, match=message):
            CompActAdamW(model.parameters(), **settings)  # type: ignore[arg-type]


def test_closures_schedulers_and_groups_work() -> None:
    model = _model()
    convert(model, rank=6, skip=())
    groups = [{"params": [p for p in model.parameters() if p.dim() == 2]}, {"params": [], "lr": 0.5}]
    groups[1]["params"] = [p for p in model.parameters() if p.dim() == 1]
    optimizer = CompActAdamW(groups, lr=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    before = [p.detach().clone() for p in model.parameters()]
    (x, y), *_ = _batches(1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss.item()

    wanted = (model(x) - y).square().mean().item()
    assert optimizer.step(closure) == wanted
    schedule.step()
    changed = [not torch.equal(old, p) for old, p in zip(before, model.parameters(), strict=True)]
    assert changed == [p.dim() == 1 for p in model.parameters()]
