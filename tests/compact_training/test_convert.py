"""compact.convert and revert: the same modules, parameters and names, and errors that name the layer."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from compact import PAPER_SKIP, CompActAdamW, ConvertError, RankError, convert, revert
from compact._training.convert import CompactConv1D, CompactLinear
from support.models import llama, transformer


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.o_proj = nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 40), nn.Linear(40, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.o_proj((self.q(x) * self.k(x)).softmax(-1) * self.v(x))
        return x + self.down(self.up(x).relu_())


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 16)
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.lm_head = nn.Linear(16, 11, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


IDS = torch.arange(10).reshape(2, 5)
CONVERTED = [f"blocks.{block}.{name}" for block in range(2) for name in ("q", "k", "v", "up", "down")]


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_same_objects_names_and_outputs_there_and_back() -> None:
    model = _Model()
    before, parameters, modules = _state(model), list(model.parameters()), list(model.modules())
    classes, printed, attributes = [type(m) for m in modules], repr(model), [set(vars(m)) for m in modules]
    with torch.no_grad():
        wanted = model(IDS)
    assert convert(model, rank=4) == CONVERTED
    assert [type(model.get_submodule(name)) for name in CONVERTED] == [CompactLinear] * 10
    assert isinstance(model.blocks[0].o_proj, nn.Linear)
    assert "CompactLinear(16, 40, bias=True, rank=4, kind=gaussian)" in repr(model)
    for model_now in (model, None):
        assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
        assert all(a is b for a, b in zip(modules, model.modules(), strict=True))
        assert all(map(torch.equal, before.values(), model.state_dict().values()))
        assert list(before) == list(model.state_dict())
        assert torch.equal(model(IDS), wanted)
        if model_now is not None:
            assert revert(model) == CONVERTED
    assert [type(m) for m in modules] == classes
    assert repr(model) == printed
    # The list for DistributedDataParallel stays, empty.
    assert [set(vars(m)) - {"_ddp_params_and_buffers_to_ignore"} for m in modules] == attributes
    assert not any(hasattr(p, "subspace") for p in model.parameters())
    model(IDS).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_input_gradients_are_bit_equal_through_the_whole_model() -> None:
    # Everything before and between compact layers: norms, biases, embeddings, what was left out.
    plain, compact = _Model(), _Model()
    convert(compact, rank=4)
    for model in (plain, compact):
        model(IDS).square().sum().backward()
    for (name, exact), found in zip(plain.named_parameters(), compact.parameters(), strict=True):
        if name.removesuffix(".weight") in CONVERTED:
            assert found.grad is None
        else:
            assert torch.equal(exact.grad, found.grad), name  # type: ignore[arg-type]


def test_state_dicts_serve_either_form() -> None:
    plain, compact = _Model(), _Model()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(1)
    convert(compact, rank=4)
    compact.load_state_dict(plain.state_dict())
    assert torch.equal(compact(IDS), plain(IDS))
    fresh = _Model()
    fresh.load_state_dict(compact.state_dict())
    assert torch.equal(fresh(IDS), plain(IDS))
    # Loading by assignment makes new parameters.
    compact.load_state_dict(_state(plain), assign=True)
    compact(IDS).sum().backward()
    assert compact.blocks[0].q.weight.subspace.grad.shape == (16, 4)  # type: ignore[attr-defined]


def test_copies_and_pickles_are_compact_too_and_apart() -> None:
    model = _Model()
    convert(model, rank=4, share=True)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        weight = other.blocks[1].down.weight
        assert weight.subspace is other.blocks[1].down.subspace
        assert weight.subspace is not model.blocks[1].down.subspace  # type: ignore[union-attr]
        block = other.blocks[0]
        assert block.q.shared is block.k.shared
        assert block.q.shared is not model.blocks[0].q.shared  # type: ignore[union-attr]
        other(IDS).sum().backward()
        assert weight.subspace.grad is not None
        assert model.blocks[1].down.weight.subspace.grad is None  # type: ignore[union-attr]
        assert revert(other) == CONVERTED


def test_projections_differ_by_layer_and_seed_and_agree_by_name() -> None:
    def keys(**settings: Any) -> list[int]:
        model = _Model()
        convert(model, rank=4, **settings)
        return [model.get_submodule(name).subspace.base_key for name in CONVERTED]  # type: ignore[union-attr]

    assert len(set(keys())) == 10
    assert keys() == keys()
    assert not set(keys()) & set(keys(seed=1))
    shared = keys(share=True)
    assert len(set(shared)) == 2  # one a block; sizes tell `down` from the others


def test_rank_may_be_a_share_of_each_width() -> None:
    model = _Model()
    convert(model, rank=0.25)
    ranks = [model.get_submodule(name).subspace.rank for name in CONVERTED]  # type: ignore[union-attr]
    assert ranks == [4, 4, 4, 4, 10] * 2
    revert(model)
    convert(model, rank=0.001)
    assert model.blocks[0].q.subspace.rank == 1  # type: ignore[union-attr]


def test_skip_takes_patterns_and_functions() -> None:
    model = _Model()
    assert convert(model, rank=4, skip=["blocks.0.*", "lm_head"]) == [
        f"blocks.1.{name}" for name in ("q", "k", "v", "o_proj", "up", "down")
    ]
    revert(model)
    assert convert(model, rank=4, skip=(*PAPER_SKIP, "*.up")) == [name for name in CONVERTED if "up" not in name]
    revert(model)
    assert convert(model, rank=4, skip=lambda name, module: not name.endswith("down")) == [
        "blocks.0.down",
        "blocks.1.down",
    ]


def test_what_cannot_be_compact_is_left_alone() -> None:
    class Odd(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    model = nn.ModuleDict(
        {
            "plain": nn.Linear(8, 8),
            "odd": Odd(8, 8),
            "frozen": nn.Linear(8, 8).requires_grad_(False),
            "embed": nn.Embedding(8, 8),
            "tied": nn.Linear(8, 8),
            "attention": nn.MultiheadAttention(8, 2),  # never calls its projection
        }
    )
    model["tied"].weight = model["embed"].weight
    assert convert(model, rank=2, skip=()) == ["plain"]


def test_hooks_and_modes_stay() -> None:
    model = _Model().eval()
    calls: list[str] = []
    model.blocks[0].q.register_forward_hook(lambda *_: calls.append("called"))
    convert(model, rank=4)
    assert not model.blocks[0].q.training
    model(IDS)
    revert(model)
    model(IDS)
    assert calls == ["called", "called"]


def test_a_rank_above_a_width_names_the_layer_and_changes_nothing() -> None:
    model = _Model()
    with pytest.raises(RankError, match=r"layer 'blocks.0.q' was given rank 17, but its width is 16"):
        convert(model, rank=17)
    assert not any(isinstance(module, CompactLinear) for module in model.modules())
    with pytest.raises(RankError, match="rank 0"):
        convert(model, rank=0)


def test_says_what_is_wrong() -> None:
    with pytest.raises(ConvertError, match=r"Sequential has no linear layer to convert: 0 found; only exact nn.Linear"):
        convert(nn.Sequential(nn.ReLU(), nn.Conv2d(1, 1, 1)), rank=4)
    with pytest.raises(ConvertError, match=r"1 found \(1 frozen\): unfreeze or skip less"):
        convert(nn.Sequential(nn.Linear(8, 8).requires_grad_(False)), rank=4)
    model = _Model()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"skip": ["*.qq"]}, r"pattern '\*.qq' fits none of the 13 linear layers: compare with \['blocks.0.q'"),
        ({"skip": "*.q"}, r"skip is the string '\*.q': give a list"),
        ({"rank": 1.5}, "rank 1.5 is a share of each width"),
        ({"kind": "svd"}, "kind 'svd' is not known: choose one of gaussian"),
        ({"refresh": 0}, "refresh is 0 steps"),
        ({"alpha": 0.0}, "alpha is 0.0"),
    ]
    for settings, message in cases:
        with pytest.raises(ConvertError, match=message):
            convert(model, **{"rank": 4, **settings})
    with pytest.raises(ConvertError, match="no compact layer to revert"):
        revert(model)
    convert(model, rank=4)
    with pytest.raises(ConvertError, match=r"layer 'blocks.0.q' is compact already \(10 are\)"):
        convert(model, rank=4)


@pytest.mark.parametrize("bias", [True, False])
def test_conv1d_of_transformers(bias: bool) -> None:
    torch.manual_seed(0)
    plain = Conv1D(24, 16)
    if not bias:
        plain.bias.requires_grad_(False)
    compact = copy.deepcopy(plain)
    assert convert(compact, rank=16, kind="orthonormal", alpha=1.0, refresh=None) == [""]
    assert type(compact) is CompactConv1D
    results = []
    for layer in (plain, compact):
        torch.manual_seed(1)
        x = torch.randn(3, 5, 16, requires_grad=True)
        out = layer(x)
        out.square().sum().backward()
        results.append((out.detach(), x.grad, layer.bias.grad if bias else None))
    for wanted, found in zip(*results, strict=True):
        assert (wanted is None and found is None) or torch.equal(wanted, found)  # type: ignore[arg-type]
    space = compact.weight.subspace  # type: ignore[attr-defined]
    assert space.grad.shape == (24, 16)
    torch.testing.assert_close(space.projection().back(space.grad).t(), plain.weight.grad, rtol=1e-4, atol=1e-4)
    before = compact.weight.detach().clone()
    wanted = before - 0.1 * space.projection().back(space.grad.sign()).t()
    CompActAdamW(compact.parameters(), lr=0.1).step()
    torch.testing.assert_close(compact.weight.detach(), wanted)
    assert revert(compact) == [""]
    assert type(compact) is Conv1D


def _bert() -> tuple[nn.Module, dict[str, Tensor], set[str]]:
    sizes = {"width": 32, "inner": 64, "layers": 1, "heads": 2, "hidden_dropout_prob": 0.0}
    model = transformer("BertForSequenceClassification", **sizes, attention_probs_dropout_prob=0.0)
    batch = {"input_ids": torch.arange(24).reshape(2, 12), "labels": torch.tensor([0, 1])}
    layer = "bert.encoder.layer.0."
    names = {layer + "attention.self." + name for name in ("query", "key", "value")}
    return model, batch, names | {layer + "intermediate.dense", layer + "output.dense"}


def _gpt2() -> tuple[nn.Module, dict[str, Tensor], set[str]]:
    sizes = {"width": 32, "layers": 1, "heads": 2, "positions": 16}
    model = transformer("GPT2LMHeadModel", **sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    ids = torch.arange(24).reshape(2, 12)
    names = {f"transformer.h.0.{name}" for name in ("attn.c_attn", "mlp.c_fc", "mlp.c_proj")}
    return model, {"input_ids": ids, "labels": ids}, names


def _llama() -> tuple[nn.Module, dict[str, Tensor], set[str]]:
    ids = torch.arange(24).reshape(2, 12)
    names = {f"model.layers.0.self_attn.{name}_proj" for name in "qkv"}
    names |= {f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")}
    return llama(layers=1), {"input_ids": ids, "labels": ids}, names


@pytest.mark.parametrize("make", [_bert, _gpt2, _llama])
@pytest.mark.parametrize("share", [False, True])
def test_models_of_transformers_learn(make: Any, share: bool) -> None:
    torch.manual_seed(0)
    model, batch, names = make()
    with torch.no_grad():
        wanted = model(**batch).loss
    assert set(convert(model, rank=8, alpha=1.0, refresh=5, share=share)) == names  # the paper's layers
    assert torch.equal(model(**batch).loss.detach(), wanted)
    optimizer = CompActAdamW(model.parameters(), lr=0.01, at_refresh="carry")
    for _ in range(12):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
    assert loss < 0.5 * wanted
    revert(model)
    with torch.no_grad():
        assert model(**batch).loss < 0.5 * wanted
