"""compact.convert and revert: the same modules, parameters and names, and errors that name the layer."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from compact import PAPER_SKIP, CompActAdamW, ConvertError, RankError, bias, convert, revert
from compact._training.convert import CompactConv1D, CompactLinear, SampledConv1D, SampledLinear
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


@pytest.mark.parametrize(
    ("method", "layer", "shown"),
    [("projection", CompactLinear, "kind=gaussian"), ("wta-crs", SampledLinear, "method=wta-crs")],
)
def test_same_objects_names_and_outputs_there_and_back(method: Any, layer: type, shown: str) -> None:
    model = _Model()
    before, parameters, modules = _state(model), list(model.parameters()), list(model.modules())
    classes, printed, attributes = [type(m) for m in modules], repr(model), [set(vars(m)) for m in modules]
    with torch.no_grad():
        wanted = model(IDS)
    assert convert(model, rank=4, method=method) == CONVERTED
    assert [type(model.get_submodule(name)) for name in CONVERTED] == [layer] * 10
    assert type(model.blocks[0].o_proj) is nn.Linear
    assert f"{layer.__name__}(16, 40, bias=True, rank=4, {shown})" in repr(model)
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
        ({"method": "crs"}, "method 'crs' is not known: choose one of projection, wta-crs"),
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


# -- method="wta-crs" -------------------------------------------------------------------------------------------------


def _sampled_gradients(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    model(IDS).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _kept(model: nn.Module, ids: Tensor) -> dict[torch.dtype, int]:
    """Bytes that a forward saves, each storage once and without weights, by dtype."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        seen.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(ids)
    found: dict[torch.dtype, int] = {}
    for address, tensor in seen.items():
        if address not in weights:
            found[tensor.dtype] = found.get(tensor.dtype, 0) + tensor.untyped_storage().nbytes()
    del out
    return found


@pytest.mark.parametrize("share", [False, True])
def test_sampled_layers_save_the_bytes_of_a_projection_with_indices_and_factors(share: bool) -> None:
    ids = torch.arange(32).reshape(2, 16) % 11
    kept = []
    for method in ("projection", "wta-crs"):
        model = _Model()
        convert(model, rank=0.25, method=method, share=share)  # type: ignore[arg-type]
        kept.append(_kept(model, ids))
    inputs = 2 * (3 if share else 5)  # shared: q, k and v; and up, down
    assert kept[1].pop(torch.float32) - kept[0].pop(torch.float32) == inputs * 8 * 4
    assert kept[1].pop(torch.int32) == inputs * 8 * 4
    assert kept[0] == kept[1]  # token ids


def test_sampled_layers_change_their_weights_gradients_alone() -> None:
    plain, model = _Model(), _Model()
    exact = _sampled_gradients(plain)
    convert(model, rank=4, method="wta-crs")
    found = _sampled_gradients(model)
    differ = [name for name, gradient in exact.items() if not torch.equal(gradient, found[name])]
    assert differ == [f"{name}.weight" for name in CONVERTED]
    assert getattr(model, "_ddp_params_and_buffers_to_ignore", []) == []
    revert(model)
    assert all(map(torch.equal, exact.values(), _sampled_gradients(model).values()))
    convert(model, rank=1.0, method="wta-crs")  # every row
    assert all(map(torch.equal, exact.values(), _sampled_gradients(model).values()))


def test_sampled_layers_have_weight_gradients_without_bias() -> None:
    exact, draws, names = _sampled_gradients(_Model()), [], [f"{name}.weight" for name in CONVERTED]
    for seed in range(200):
        model = _Model()
        convert(model, rank=0.5, method="wta-crs", seed=seed)
        draws.append(_sampled_gradients(model))
    found = [bias((draw[name] for draw in draws), exact[name]) for name in names]
    assert min(layer.error for layer in found) > 0.5
    # The squared error of the draws' mean, as a multiple of variance / draws: without bias it averages 1. A bias of an
    # eighth of one draw's error would make it 4.
    assert statistics.mean(layer.ratio for layer in found) < 2


def test_samples_depend_on_seed_and_step_and_not_on_checkpoints() -> None:
    def made(seed: int = 0, steps: int = 0, recompute: bool = False) -> Tensor:
        model = _Model()
        convert(model, rank=4, method="wta-crs", seed=seed)
        with torch.no_grad():
            for _ in range(steps):
                for parameter in model.parameters():
                    parameter.mul_(1)  # a step that changes nothing but versions
        if recompute:
            for block in model.blocks:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
        return _sampled_gradients(model)["blocks.0.up.weight"]

    first = made()
    assert torch.equal(made(), first)
    assert torch.equal(made(recompute=True), first)
    assert not torch.equal(made(seed=1), first)
    assert not torch.equal(made(steps=1), first)


def test_sampled_layers_are_saved_copied_and_trained_as_any() -> None:
    model = _Model()
    convert(model, rank=4, method="wta-crs", share=True)
    plain = _Model()
    plain.load_state_dict(model.state_dict())
    model.load_state_dict(_state(plain), assign=True)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.blocks[0].q.shared is other.blocks[0].k.shared
        assert all(map(torch.equal, _sampled_gradients(other).values(), _sampled_gradients(other).values()))
        assert revert(other) == CONVERTED
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        losses.append(torch.nn.functional.cross_entropy(model(IDS).flatten(0, 1), IDS.flatten()))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.2 * losses[0]
    with pytest.raises(ConvertError, match=r"layer 'blocks.0.q' is compact already \(10 are\)"):
        convert(model, rank=4)


def test_a_sampled_conv1d_has_the_gradients_of_its_rows() -> None:
    torch.manual_seed(0)
    plain = Conv1D(24, 16)
    sampled = copy.deepcopy(plain)
    assert convert(sampled, rank=16, method="wta-crs") == [""]
    assert type(sampled) is SampledConv1D
    x = torch.randn(3, 5, 16)
    for layer in (plain, sampled):
        layer(x).square().sum().backward()
    torch.testing.assert_close(sampled.weight.grad, plain.weight.grad)
    assert torch.equal(sampled.bias.grad, plain.bias.grad)
    assert revert(sampled) == [""]
    assert type(sampled) is Conv1D


def test_fp16_layers_with_an_outlier_channel_have_finite_weight_gradients() -> None:
    model = nn.Linear(32, 8, dtype=torch.float16)
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).half()
    x[:, 3] = 8000  # 16 times it is more than fp16 holds
    convert(model, rank=1 / 16, method="wta-crs")
    (model(x).float() * 1e-3).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == torch.float16
    assert model.weight.grad.isfinite().all()


def test_a_sampled_model_made_in_inference_mode_runs_as_a_plain_one() -> None:
    with torch.inference_mode():
        model = _Model()
        wanted = model(IDS)
        convert(model, rank=4, method="wta-crs")
        assert torch.equal(model(IDS), wanted)
    with torch.no_grad():
        assert torch.equal(model(IDS), wanted)
    layer: Any = model.get_submodule("blocks.0.down")
    plain = torch.nn.functional.linear(torch.ones(5, 40), layer.weight)
    assert torch.equal(layer(torch.ones(5, 40)), plain)
    assert not plain.requires_grad


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch hides it, but not from pytest
def test_a_compiled_model_with_sampled_layers_keeps_its_graphs_and_draws_anew() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def train(compiled: bool) -> tuple[list[Tensor], list[int]]:
        model = _Block()
        # With few layers graphs would grow step by step; many exhaust torch's limit in the first.
        assert convert(model, rank=4, method="wta-crs", skip=["?", "o_proj"]) == ["up", "down"]
        call = torch.compile(model, backend=backend) if compiled else model
        optimizer, gradients, counts = torch.optim.SGD(model.parameters(), lr=0.0), [], []
        for _ in range(12):  # more than torch compiles one function
            optimizer.zero_grad()
            call(x).square().sum().backward()
            assert model.up.weight.grad is not None
            gradients.append(model.up.weight.grad.clone())
            optimizer.step()
            counts.append(len(graphs))
        return gradients, counts

    x = torch.randn(24, 16, generator=torch.Generator().manual_seed(0))
    torch._dynamo.reset()
    try:
        torch.manual_seed(0)
        found, counts = train(compiled=True)
    finally:
        torch._dynamo.reset()
    assert counts == counts[:1] * 12
    assert counts[0] > 0
    torch.manual_seed(0)
    wanted, _ = train(compiled=False)
    assert all(map(torch.equal, found, wanted))
    assert not torch.equal(found[0], found[1])
