"""`tba.audit`: bytes counted by hand, and gradients, bit for bit under "exact" and as large as codecs make them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import compact
from compact import Exact, Projected, Quantized, Saved
from support.audit import Feed, cube
from support.models import Made
from support.zoo import FAMILIES, Family
from tba import audit
from tba._audit.audit import _compare

BITWISE = ("safe8", "balanced", "max")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(3)


# -- bytes -----------------------------------------------------------------------------------------------------------


def test_bytes_are_those_counted_by_hand() -> None:
    found = audit(Feed(), torch.randn(4, 8, 16), loss=cube)
    tokens = 4 * 8
    inner, outer, group = tokens * 32 * 4, tokens * 16 * 4, 64  # bytes of fp32; elements that share a scale
    exact = {
        Saved.LINEAR_INPUT: outer + inner,
        Saved.NORM_INPUT: outer,
        Saved.NORM_STATISTICS: 2 * tokens * 4,
        Saved.ACTIVATION_INPUT: inner,
        Saved.UNKNOWN: outer,  # what the loss takes to the third power
    }
    assert found.before_bytes == exact
    assert found.unrecognised == {"PowBackward0": outer}
    assert found.weight_bytes == (32 * 16 + 2 * 16) * 4  # down's, the norm's two; up's input requires no gradient
    assert found.duplicate_bytes == 0

    def coded(bits: float, nbytes: int) -> int:
        groups = nbytes // 4 // group
        return int(groups * (4 + group * bits / 8))

    # Made again: the activation from its input, and the norm's result, but not what must be exact from lossy tensors.
    made = {Saved.LINEAR_INPUT: outer, Saved.UNKNOWN: 0}  # a class that is not known and has nothing is left out
    expected = {
        "exact": {kind: nbytes for kind, nbytes in (exact | made).items() if nbytes},
        "safe8": exact
        | {Saved.LINEAR_INPUT: coded(8, outer)}
        | {Saved.NORM_INPUT: coded(8, outer), Saved.ACTIVATION_INPUT: coded(8, inner)},
        "balanced": exact
        | {Saved.LINEAR_INPUT: coded(4, outer)}
        | {Saved.NORM_INPUT: coded(8, outer), Saved.ACTIVATION_INPUT: coded(8, inner)},
        "max": exact
        | {Saved.LINEAR_INPUT: coded(2, outer)}
        | {Saved.NORM_INPUT: coded(4, outer), Saved.ACTIVATION_INPUT: coded(4, inner)},
        "compact": exact | {Saved.LINEAR_INPUT: (outer + inner) // 4},
    }
    del expected["compact"][Saved.UNKNOWN]
    assert {name: outcome.after_bytes for name, outcome in found.outcomes.items()} == expected


def test_what_is_saved_twice_counts_once() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return sum((layer(x.view(shape)).sum() for layer, shape in zip(self.layers, SHAPES, strict=True)), x.sum())

    three = Made(forward, layers=nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3)))
    found = audit(three, torch.randn(4, 8, 16), presets=["safe8"])
    assert found.before_bytes == {Saved.LINEAR_INPUT: 4 * 8 * 16 * 4}
    assert found.duplicate_bytes == 2 * 4 * 8 * 16 * 4


SHAPES = ((4, 8, 16), (32, 16), (2, 16, 16))


def _gelu_and(layer: nn.Module, hidden: Tensor) -> Tensor:
    """One tensor that an activation and a linear layer save."""
    out: Tensor = functional.gelu(hidden).sum() + layer(hidden).sum()
    return out


def test_the_strictest_class_has_what_several_saved() -> None:
    layers = {"first": nn.Linear(64, 64), "second": nn.Linear(64, 64)}
    model = Made(lambda self, x: _gelu_and(self.second, self.first(x)), **layers)
    found = audit(model, torch.randn(32, 64), presets=["exact", "max", "compact"])
    nbytes = 32 * 64 * 4  # of the input, and of what both save
    assert found.before_bytes == {Saved.LINEAR_INPUT: nbytes, Saved.ACTIVATION_INPUT: nbytes}
    after = found.outcomes["max"].after_bytes
    assert after == {Saved.LINEAR_INPUT: 32 * (4 + 16), Saved.ACTIVATION_INPUT: 32 * (4 + 32)}  # int2, int4
    # compact_linear saves its projection even where another operator saves the input.
    after = found.outcomes["compact"].after_bytes
    assert after == {Saved.LINEAR_INPUT: 2 * nbytes // 4, Saved.ACTIVATION_INPUT: nbytes}


# -- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_exact_is_exact_and_fewer_bits_are_more_error(family: Family) -> None:
    found = audit(family.make_model(), family.make_batch(), presets=["exact", *BITWISE])
    exact = found.outcomes["exact"]
    assert (exact.cosine, exact.relative_error, exact.worst, exact.worst_error) == (1.0, 0.0, "", 0.0)
    errors = [found.outcomes[name].relative_error for name in BITWISE]
    assert 0 < errors[0] < 0.01
    assert errors == sorted(errors)
    assert errors[2] < 1
    for name in BITWISE:
        outcome = found.outcomes[name]
        assert 1 - outcome.relative_error**2 < outcome.cosine < 1
        assert outcome.worst_error >= outcome.relative_error * 0.99
    sizes = [sum(found.outcomes[name].after_bytes.values()) for name in ("exact", *BITWISE)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] <= sum(found.before_bytes.values())
    assert sum(found.unrecognised.values()) == found.before_bytes.get(Saved.UNKNOWN, 0)


def test_the_error_is_that_of_the_gradient() -> None:
    """With one layer the only parameter's gradient is d^T x, and all can be said without audit."""
    x, target = torch.randn(64, 128), torch.randn(64, 8)
    model = nn.Linear(128, 8, bias=False)
    d = 2 * (model(x) - target).detach()
    number = compact.key(7, 0)
    found = audit(model, x, loss=lambda out: ((out - target) ** 2).sum(), presets=["compact", "balanced"], seed=7)
    exact = d.t() @ x
    assert found.gradient_norm == pytest.approx(float(exact.norm()), rel=1e-6)
    projected, int4 = Projected(), compact.preset("balanced")[Saved.LINEAR_INPUT]
    gradients = {
        "compact": d.t() @ projected.decode(projected.encode(x, number)),
        "balanced": d.t() @ int4.decode(int4.encode(x, number)),
    }
    for name, gradient in gradients.items():
        outcome = found.outcomes[name]
        error, cosine = compact.relative_error(gradient, exact), compact.cosine(gradient, exact)
        if name == "balanced":
            assert outcome.relative_error == pytest.approx(error, rel=1e-4)
            assert outcome.cosine == pytest.approx(cosine, rel=1e-5)
        else:  # another draw of the projection
            assert outcome.relative_error == pytest.approx(error, rel=0.2)
            assert outcome.cosine == pytest.approx(cosine, rel=0.2)
        assert (outcome.worst, outcome.worst_error) == ("weight", pytest.approx(outcome.relative_error))


def test_a_seed_gives_the_same_again_and_another_one_does_not() -> None:
    model, x = nn.Sequential(Feed(), nn.Dropout(0.5)), torch.randn(4, 8, 16)
    first, again, other = (audit(model, x, loss=cube, presets=["max"], seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.gradient_norm != other.gradient_norm


def test_unusual_views_come_back_as_they_were() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        one, two = hidden.chunk(2, dim=-1)
        total = (one * two).sum() + self.layer(x[0, 0].expand(5, 16)).sum()  # gaps, and one row for all
        total = total + (hidden.unfold(1, 4, 2) * hidden.unfold(1, 4, 2).sin()).sum()  # overlapping windows
        total = total + (hidden.transpose(0, 1)[1:, ::2] * self.scale).pow(3).sum()
        total = total + (torch.fft.fft(hidden) * self.wave.conj()).abs().sum()  # complex, conjugate
        return total + functional.rrelu(hidden, training=True).sum() + (hidden[:0] * self.scale).sum()

    scale, wave = nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(16, dtype=torch.complex64))
    odd = Made(forward, layer=nn.Linear(16, 16), scale=scale, wave=wave)
    found = audit(odd, torch.randn(4, 8, 16), presets=["exact", "safe8"])
    assert found.outcomes["exact"].relative_error == 0.0
    assert 0 < found.outcomes["safe8"].relative_error < 0.02


def test_what_no_codec_is_given_is_kept_and_said() -> None:
    weight, dense = nn.Parameter(torch.randn(4, 3)), torch.eye(4)
    sparse = Made(lambda self, a, x: torch.sparse.mm(a, self.weight * x).sum(), weight=weight)
    found = audit(sparse, [dense.to_sparse(), torch.randn(4, 3)], presets=["exact"])
    assert found.unrecognised["kept as they are"] == 4 * 4 * 4
    assert found.outcomes["exact"].relative_error == 0.0


def test_inputs_of_checkpoints_are_named() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return cube(checkpoint(self.feed, self.first(x), use_reentrant=False))

    again = Made(forward, first=nn.Linear(16, 16), feed=Feed())
    found = audit(again, torch.randn(4, 8, 16), presets=["exact", "safe8"])
    nbytes = 4 * 8 * 16 * 4
    assert found.before_bytes == {Saved.LINEAR_INPUT: nbytes, Saved.UNKNOWN: 2 * nbytes}
    assert found.unrecognised == {"torch.utils.checkpoint": nbytes, "PowBackward0": nbytes}
    assert found.outcomes["exact"].relative_error == 0.0


def test_a_user_may_name_a_codec_for_a_class() -> None:
    mine = compact.preset("safe8").override({"norm_input": Exact(), "linear_input": Quantized("e4m3")})
    found = audit(Feed(), (torch.randn(4, 8, 16),), loss=cube, presets=["safe8", mine])
    plain, changed = (found.outcomes[name] for name in ("safe8", "safe8, changed"))
    assert changed.after_bytes[Saved.NORM_INPUT] == found.before_bytes[Saved.NORM_INPUT]
    assert changed.after_bytes[Saved.LINEAR_INPUT] == plain.after_bytes[Saved.LINEAR_INPUT]
    assert changed.relative_error > plain.relative_error  # e4m3 has 3 bits of mantissa


def test_a_gradient_that_is_rounding_is_not_the_worst() -> None:
    exact = {"weight": torch.tensor([3.0, 4.0]), "bias": torch.tensor([1e-6, 0.0])}
    found = {"weight": torch.tensor([3.0, 4.5]), "bias": torch.tensor([-1e-6, 5e-6])}
    outcome = _compare(found, exact, {})
    assert (outcome.worst, outcome.worst_error) == ("weight", pytest.approx(0.1))
    assert outcome.relative_error == pytest.approx(0.1)
    outcome = _compare({"weight": torch.tensor([3.0, math.nan]), "bias": exact["bias"]}, exact, {})
    assert (outcome.worst, outcome.worst_error, outcome.relative_error) == ("weight", math.inf, math.inf)
    assert math.isnan(outcome.cosine)
