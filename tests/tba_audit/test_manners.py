"""`tba.audit`: everything is left as it was, what is shown of what was found, and bad questions."""

from __future__ import annotations

import copy
import json
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import compact
from compact import Saved
from support.audit import Feed, bits_equal, cube
from support.models import Made
from tba import Audit, ConfigError, OffloadWarning, audit
from tba._audit.audit import _compare


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(3)


# -- all as it was ---------------------------------------------------------------------------------------------------


class Norms(nn.Module):
    """Batch norm, a frozen batch norm, dropout of both generators, a buffer that is replaced, and an EMA."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.batch, self.frozen = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.BatchNorm1d(8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("none", None)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.dropout(self.batch(self.layer(x)) + self.frozen(x) + self.mean, training=self.training)
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        return hidden * (1 + random.random())


def test_all_is_left_as_it_was() -> None:
    model = Norms()
    model.frozen.eval()
    stepped: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: stepped.append(name))
    x = torch.randn(16, 8, requires_grad=True)
    model.layer.weight.grad = torch.randn(8, 8)
    grad, frozen_version = model.layer.weight.grad, model.frozen.running_mean._version
    objects = dict(model.named_buffers())
    before, contents = copy.deepcopy(model.state_dict()), grad.clone()
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    states = torch.get_rng_state(), random.getstate()
    found = audit(model, x, loss=cube, presets=["exact", "safe8"])
    assert found.outcomes["exact"].relative_error == 0.0
    assert model.layer.weight.grad is grad
    assert bits_equal(grad, contents)
    assert x.grad is None
    assert model.batch.weight.grad is None
    assert stepped == []
    assert [m.training for m in (model, model.layer, model.batch, model.frozen)] == [True, True, True, False]
    assert model.state_dict().keys() == before.keys()
    assert all(bits_equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(buffer is objects[name] for name, buffer in model.named_buffers())
    assert model.frozen.running_mean._version == frozen_version
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks


class Lazy(nn.Module):
    """Makes buffers in its first forward, of one that was registered without a tensor and of one that was not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.forwards_that_made_them = nn.Linear(8, 8), 0
        self.register_buffer("scale", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = x.detach().abs().max()
            self.register_buffer("cache", x.detach().clone(), persistent=False)
            self.forwards_that_made_them += 1
        return self.layer(x / self.scale).tanh()


def test_buffers_that_a_forward_makes_are_gone_again() -> None:
    model = Lazy()
    found = audit(model, torch.randn(16, 8), loss=cube, presets=["exact", "safe8"])
    assert found.outcomes["exact"].relative_error == 0.0
    assert model._buffers == {"scale": None}
    assert not model._non_persistent_buffers_set
    assert model.forwards_that_made_them > 2  # each run began as the first one did


def test_an_interrupted_audit_leaves_nothing_to_the_next() -> None:
    class RMSNorm(nn.Module):
        forwards = 0

        def forward(self, x: Tensor) -> Tensor:
            self.forwards += 1
            if self.forwards > 1:  # the first is one that nobody looks at
                raise KeyboardInterrupt
            return x * x.pow(2).mean(-1, keepdim=True).rsqrt()

    x, product = torch.randn(16, 8), _returns(lambda hidden: hidden * hidden.tanh())
    before = audit(product, x, loss=cube, presets=["safe8"]).before_bytes
    with pytest.raises(KeyboardInterrupt):
        audit(nn.Sequential(nn.Linear(8, 8), RMSNorm()), x, presets=["safe8"])
    assert audit(product, x, loss=cube, presets=["safe8"]).before_bytes == before


def test_all_is_left_as_it_was_when_the_model_fails() -> None:
    class Fails(Norms):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise ArithmeticError("in the middle")

    model, x = Fails().eval(), torch.randn(16, 8)
    before, states = copy.deepcopy(model.state_dict()), (torch.get_rng_state(), random.getstate())
    with pytest.raises(ArithmeticError, match="in the middle"):
        audit(model, x)
    assert not any(module.training for module in model.modules())
    assert all(bits_equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


def test_a_model_in_evaluation_is_audited_as_it_would_train() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).eval()
    with torch.no_grad():
        found = audit(model, torch.randn(16, 8), loss=cube, presets=["exact"])
    assert Saved.MASK in found.before_bytes
    assert not any(module.training for module in model.modules())


# -- what is shown ---------------------------------------------------------------------------------------------------


def test_the_table_has_every_class_preset_and_saver() -> None:
    found = audit(Feed(), {"x": torch.randn(4, 8, 16)}, loss=cube, presets=["exact", "safe8"])
    bytes_table, gradients, savers = (part.splitlines() for part in str(found).split("\n\n"))
    assert bytes_table[0].split()[2:] == ["plain", "exact", "safe8"]
    assert bytes_table[1].split() == ["linear_input", "6.0", "KiB", "2.0", "KiB", "544", "B"]
    assert bytes_table[-2].split()[:3] == ["all", "14.2", "KiB"]
    tables = (found.before_bytes, *(found.outcomes[name].after_bytes for name in ("exact", "safe8")))
    total, made, after = (sum(table.values()) for table in tables)
    assert bytes_table[-1].split()[2:] == ["100%", f"{made / total:.1%}", f"{after / total:.1%}"]
    assert len({len(line) for line in bytes_table}) == 1
    assert gradients[1].split() == ["exact", "1.000000", "0", "none", "0"]
    assert gradients[2].split()[0] == "safe8"
    assert savers[1].split() == ["PowBackward0", "2.0", "KiB"]


def test_the_data_is_json_even_where_numbers_are_not_finite() -> None:
    found = audit(Feed(), torch.randn(4, 8, 16), loss=cube, presets=["exact", "safe8"])
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert data["before_bytes"]["norm_input"] == 2048
    assert data["presets"]["safe8"]["after_bytes"]["norm_input"] == 544
    assert data["presets"]["exact"]["relative_error"] == 0
    assert data["unrecognised_bytes"] == {"PowBackward0": 2048}
    json.dumps(_broken().to_dict(), allow_nan=False)
    assert _broken().to_dict()["presets"]["mine"]["cosine"] is None


def _broken() -> Audit:
    exact = {"weight": torch.tensor([3.0, 4.0])}
    return Audit(
        before_bytes={Saved.LINEAR_INPUT: 8},
        outcomes={"mine": _compare({"weight": torch.tensor([math.nan, 0.0])}, exact, {Saved.LINEAR_INPUT: 2})},
        unrecognised={},
        weight_bytes=0,
        duplicate_bytes=0,
        gradient_norm=5.0,
    )


@pytest.mark.parametrize(
    ("make", "ending"), [(lambda: audit(Feed(), torch.randn(4, 8, 16), loss=cube), "png"), (_broken, "svg")]
)
def test_a_picture_is_drawn(make: Callable[[], Audit], ending: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"audit.{ending}"
    make().picture(path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG" if ending == "png" else b"<?xml")
    assert len(content) > 10_000


def test_a_picture_that_cannot_be_drawn_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match=r"audit\.jpeg2', must end in .*\.png"):
        _broken().picture(tmp_path / "audit.jpeg2")
    with pytest.raises(ConfigError, match=r"no directory .*nowhere; create it"):
        _broken().picture(tmp_path / "nowhere" / "audit.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'tba-offload\[plot\]'"):
        _broken().picture(tmp_path / "audit.png")


# -- bad questions ---------------------------------------------------------------------------------------------------


class Output(dict):  # type: ignore[type-arg]
    """As transformers' outputs: a mapping with a `loss`."""


def _returns(make: Callable[[Tensor], Any]) -> nn.Module:
    return Made(lambda self, x: make(self.layer(x)), layer=nn.Linear(8, 8))


@pytest.mark.parametrize(
    ("model", "batch", "settings", "message"),
    [
        (Feed(), torch.randn(4, 16), {"presets": ["safe16"]}, "no preset 'safe16': choose one of exact, safe8"),
        (Feed(), torch.randn(4, 16), {"presets": []}, r"presets \[\]: give at least one"),
        (
            Feed(),
            torch.randn(4, 16),
            {"presets": ["max", "max"]},
            r"\['max', 'max'\]: give at least one, and each name",
        ),
        (Feed(), "text", {}, "batch of type str: give a tensor, a tuple"),
        (Feed().requires_grad_(False), torch.randn(4, 16), {}, "none of whose parameters requires a gradient"),
        (Feed(), torch.randn(4, 16), {"loss": lambda out: out}, r"loss\(output\) is a tensor \[4, 16\]"),
        (Feed(), torch.randn(4, 16), {"loss": lambda out: 3.0}, r"loss\(output\) is float"),
        (Feed(), torch.randn(4, 16), {"loss": lambda out: out.sum().detach()}, "that requires no gradient"),
        (
            _returns(lambda out: (out, out)),
            torch.randn(4, 8),
            {},
            "`loss` of the model's tuple is NoneType: put labels",
        ),
        (_returns(lambda out: Output(loss=None)), torch.randn(4, 8), {}, "`loss` of the model's Output is NoneType"),
        (_returns(lambda out: out / 0), torch.randn(4, 8), {}, r"not finite for layer\.weight \(2 of 2 parameters\)"),
        (_returns(lambda out: out * 0), torch.randn(4, 8), {}, "a gradient of zero for every parameter"),
        (
            nn.Linear(8, 8),
            torch.randn(4, 8),
            {"presets": [compact.preset("compact", rank=9)]},
            r"'compact' cannot be audited on this model: .* was given rank 9, .* name another codec with",
        ),
    ],
)
def test_a_bad_question_is_answered_with_what_to_do(model: Any, batch: Any, settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        audit(model, batch, **settings)


def test_a_preset_without_effect_is_said_to_have_none() -> None:
    model = nn.LayerNorm(8)
    with pytest.warns(OffloadWarning, match="'compact' has nothing to compress here: .* classes linear_input;"):
        found = audit(model, torch.randn(4, 8), loss=cube, presets=["compact"])
    assert found.outcomes["compact"].relative_error == 0.0


def test_hooks_inside_the_model_that_hide_what_is_saved_are_said() -> None:
    def hidden(self: Any, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            out: Tensor = self.layer(x).sum()
            return out

    with pytest.raises(ConfigError, match="no saved tensor but weights reached audit"):
        audit(Made(hidden, layer=nn.Linear(8, 8)), torch.randn(4, 8))
