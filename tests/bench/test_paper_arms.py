"""Tests of the arms by PRAC and GACT: what they are shown, that estimates are unbiased, and that budgets are met."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compact
from benchmarks._arms.stored_bytes import unique_bytes
from benchmarks._fidelity.adaptive import TOPS, AdaptiveHooks, assign_bits
from benchmarks._fidelity.places import ACTIVATION, ATTENTION, LINEAR, NORM, Place, PlacedHooks
from benchmarks._fidelity.principal import Bases, PrincipalHooks
from benchmarks._workload.gpt import GPT, GPTConfig

CONFIG = GPTConfig(layers=2, width=32, heads=2, sequence=16)
TOKENS = torch.randint(256, (4, 16), generator=torch.Generator().manual_seed(0))


class Keeping(PlacedHooks):
    """Hooks that keep everything, and note what they are shown."""

    period = 10

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.seen: list[tuple[Place, torch.Size]] = []
        self.learned = 0

    def encode(self, place: Place, tensor: Tensor) -> None:
        self.seen.append((place, tensor.shape))

    def learn(self, run: Callable[[], None]) -> None:
        self.learned += 1


def _gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG)


def _gradients(model: nn.Module, hooks: PlacedHooks | None = None, step: int = 0) -> list[Tensor]:
    def run() -> None:
        model(TOKENS, TOKENS).backward()

    model.zero_grad()
    if hooks is None:
        run()
    else:
        with hooks.step(step, run):
            model.zero_grad()
            run()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def _spectrum(rows: int, width: int) -> Tensor:
    """Activations that a few directions hold most of."""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(width, width, generator=generator) * torch.linspace(0, 3, width).neg().exp()[:, None]
    return torch.randn(rows, width, generator=generator) @ mixed


# -- places ----------------------------------------------------------------------------------------------------------


def test_hooks_are_shown_each_activation_once_and_change_nothing() -> None:
    model = _gpt()
    plain = _gradients(model)
    hooks = Keeping(model)
    for number in range(2):
        hooks.seen.clear()
        found = _gradients(model, hooks, step=number)
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
        places = [place for place, _ in hooks.seen]
        assert len(set(places)) == len(places)
        counts = {
            name: sum(place.function == name for place in places) for name in (LINEAR, NORM, ACTIVATION, ATTENTION)
        }
        # Each block: four linear layers, two norms, one activation, q, k, v and the output. Then a norm and the head.
        assert counts == {LINEAR: 9, NORM: 5, ACTIVATION: 2, ATTENTION: 8}
        assert {shape.numel() for place, shape in hooks.seen} == {4 * 16 * 32, 4 * 16 * 128}
    assert hooks.held_bytes == unique_bytes(model, lambda: model(TOKENS, TOKENS))
    assert (hooks.learned, hooks.forwards) == (1, 2)
    _gradients(model, hooks, step=10)
    assert hooks.learned == 2


def test_hooks_learn_early_in_the_first_period() -> None:
    hooks = Keeping(_gpt())
    hooks.period = 500
    assert [step for step in range(1600) if hooks.is_due(step)] == [0, 25, 50, 100, 200, 400, 500, 1000, 1500]
    hooks.period = 3
    assert [step for step in range(30) if hooks.is_due(step)] == list(range(0, 30, 3))


def test_hooks_leave_nothing_behind_when_a_forward_fails() -> None:
    model = _gpt()
    hooks = Keeping(model)
    with pytest.raises(IndexError), hooks.packing():
        model(TOKENS + 256)
    hooks.seen.clear()
    plain = _gradients(model)
    assert hooks.seen == []
    found = _gradients(model, hooks)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


# -- PRAC ------------------------------------------------------------------------------------------------------------


def test_principal_directions_come_back_and_the_rest_does_on_average() -> None:
    x = _spectrum(256, 32)
    bases = [Bases.of(x, 0.25, key) for key in range(400)]
    for one in bases[:3]:
        assert one.basis.shape == (32, 16)
        torch.testing.assert_close(one.basis.t() @ one.basis, torch.eye(16), atol=1e-5, rtol=0)
        assert one.k == (32 - 8) / 8
        # In the principal directions nothing is lost, in any draw.
        principal = one.basis[:, :8]
        torch.testing.assert_close(one.restore(one.project(x)) @ principal, x @ principal, atol=1e-4, rtol=0)
    found = compact.bias((one.restore(one.project(x)) for one in bases), x)
    assert 0.5 < found.ratio < 2
    assert found.mean_error < 0.1 * found.error
    # The directions are those of the most energy: a plain random projection of the same rank loses far more.
    gaussian = [compact.Projection("orthonormal", 32, 16, key) for key in range(20)]
    other = compact.bias((p.back(p.project(x)) for p in gaussian), x)
    assert found.error < 0.7 * other.error


def test_a_principal_weight_gradient_is_unbiased_and_input_gradients_are_exact() -> None:
    torch.manual_seed(0)
    model = nn.Linear(32, 8)
    x, grad = _spectrum(64, 32).requires_grad_(), torch.randn(64, 8)

    def run() -> None:
        model(x).backward(grad)

    run()
    assert model.weight.grad is not None
    assert x.grad is not None
    weight, source = model.weight.grad.clone(), x.grad.clone()
    draws = []
    for seed in range(200):
        hooks = PrincipalHooks(model, linear_share=0.25, norm_share=0.25, refresh=5, seed=seed)
        with hooks.step(0, run):
            model.zero_grad()
            x.grad = None
            run()
        assert hooks.held_bytes == 64 * 16 * 4
        assert model.weight.grad is not None
        draws.append(model.weight.grad.clone())  # the next learning adds to it
        assert torch.equal(x.grad, source)
    found = compact.bias(draws, weight)
    assert 0.5 < found.ratio < 2
    assert found.error > 0.01


def test_principal_hooks_hold_their_share_and_learn_anew_when_it_is_time() -> None:
    model = _gpt()
    hooks = PrincipalHooks(model, linear_share=0.25, norm_share=0.125, refresh=3, seed=0)
    runs = 0

    def counted(*_: Any) -> None:
        nonlocal runs
        runs += 1

    model.register_forward_pre_hook(counted)
    found = []
    for step in range(4):
        found.append(_gradients(model, hooks, step=step))
    assert runs == 4 + 2
    # Between two refreshes bases stay, so that equal steps have equal gradients.
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[2], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(found[0], found[3], strict=True))
    kept, floats = Keeping(model), 4 * 16 * 32
    _gradients(model, kept)
    # Per block: linear inputs of width 32, 32 and 128 at half, and norms at a quarter of their elements.
    packed = 2 * (0.5 * (1 + 1 + 4) + 0.25 * 2) + 0.5 + 0.25
    shown = 2 * (6 + 2) + 2
    assert kept.held_bytes - hooks.held_bytes == 4 * floats * (shown - packed)


# -- GACT ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("average", [2.0, 2.5, 3.7, 4.0, 6.0, 8.0])
def test_widths_meet_the_average(average: float) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = {number: int(torch.randint(1, 9, (), generator=generator)) * 64 for number in range(40)}
    sensitivities = {number: float(torch.rand((), generator=generator)) for number in sizes}
    bits = assign_bits(sizes, sensitivities, average)
    total = sum(bits[number] * size for number, size in sizes.items())
    assert set(bits.values()) <= set(TOPS)
    # Of what is allowed less than one narrowing is left.
    assert 0 <= average * sum(sizes.values()) - total < 4 * max(sizes.values())


def test_widths_are_the_best_of_all_that_cost_as_little() -> None:
    sizes = dict.fromkeys("abcde", 64)
    sensitivities = {"a": 1.0, "b": 40.0, "c": 5.0, "d": 0.01, "e": 300.0}

    def variance(widths: dict[str, int]) -> float:
        return sum(sensitivities[name] * TOPS[width] ** -2 for name, width in widths.items())

    bits = assign_bits(sizes, sensitivities, 4.4)
    assert sum(bits.values()) <= 22
    every = (dict(zip(sizes, widths, strict=True)) for widths in itertools.product(TOPS, repeat=len(sizes)))
    assert variance(bits) == min(variance(widths) for widths in every if sum(widths.values()) <= sum(bits.values()))


def test_no_width_is_below_the_narrowest() -> None:
    with pytest.raises(ValueError, match=r"an average of 1\.5 bits was asked for; the narrowest code has 2"):
        assign_bits({"a": 1}, {"a": 1.0}, 1.5)


class Two(nn.Module):
    """Two layers on one input, one of which the loss hears of a thousand times more."""

    def __init__(self) -> None:
        super().__init__()
        self.loud, self.quiet = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.loud(x.clone()) * 1000 + self.quiet(x.clone())).square().mean()


@contextmanager
def _two() -> Iterator[tuple[Two, AdaptiveHooks, Callable[[], None], list[int]]]:
    torch.manual_seed(0)
    model, x, runs = Two(), torch.randn(32, 64), [0]

    def run() -> None:
        runs[0] += 1
        model(x).backward()

    yield model, AdaptiveHooks(model, bits=5.0, refresh=4, seed=0), run, runs


def test_what_matters_more_gets_more_bits() -> None:
    with _two() as (model, hooks, run, runs):
        for step in range(5):
            with hooks.step(step, run):
                model.zero_grad()
                run()
        loud, quiet = Place(LINEAR, 0, 0), Place(LINEAR, 1, 0)
        assert hooks.widths == {loud: 8, quiet: 2}
        assert hooks.sizes == {loud: 32 * 64, quiet: 32 * 64}
        # Five steps, and twice one gradient and one more for each of two tensors.
        assert runs[0] == 5 + 2 * 3
        # Codes and a scale of 4 bytes for each 256 elements; the product's two factors are held as they are.
        codes = sum(32 * 64 * bits // 8 + 32 * 64 // 256 * 4 for bits in (8, 2))
        assert hooks.held_bytes - codes == unique_bytes(model, lambda: model(torch.ones(32, 64))) - 2 * 32 * 64 * 4


def test_noise_differs_between_steps_and_is_the_same_in_a_run_made_again() -> None:
    model = _gpt()

    def steps() -> list[list[Tensor]]:
        hooks = AdaptiveHooks(model, bits=4.0, refresh=100, seed=3)
        state = torch.get_rng_state()
        found = [_gradients(model, hooks, step=step) for step in range(2)]
        assert torch.equal(torch.get_rng_state(), state)
        narrowed = {place: size for place, size in hooks.sizes.items() if place.function != ATTENTION}
        assert len(hooks.sizes) == 9 + 5 + 2 + 8
        assert hooks.widths.keys() == narrowed.keys()
        spare = sum((4 - hooks.widths[place]) * size for place, size in narrowed.items())
        assert 0 <= spare < 4 * max(narrowed.values())
        return found

    once, again = steps(), steps()
    assert all(torch.equal(a, b) for x, y in zip(once, again, strict=True) for a, b in zip(x, y, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(*once, strict=True))
    plain = torch.cat([gradient.flatten() for gradient in _gradients(model)])
    assert compact.cosine(torch.cat([gradient.flatten() for gradient in once[0]]), plain) > 0.9


def test_an_adaptive_weight_gradient_is_unbiased() -> None:
    torch.manual_seed(0)
    model, x, grad = nn.Linear(64, 8), torch.randn(32, 64), torch.randn(32, 8)

    def run() -> None:
        model(x).backward(grad)

    run()
    assert model.weight.grad is not None
    exact = model.weight.grad.clone()
    draws = []
    hooks = AdaptiveHooks(model, bits=2.0, refresh=10**6, seed=0)
    for step in range(200):
        with hooks.step(step, run):
            model.zero_grad()
            run()
        assert model.weight.grad is not None
        draws.append(model.weight.grad)
    found = compact.bias(draws, exact)
    assert 0.5 < found.ratio < 2
    assert found.error > 0.05
