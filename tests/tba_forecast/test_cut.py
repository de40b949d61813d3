"""Parts of layers on one rank of tensor parallelism: their shapes, what is saved of them, and what cannot be cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tba import ConfigError
from tba._forecast.cut import cut
from tba._forecast.hardware import DEVICES
from tba._forecast.observe import Observed, observe

CARD = DEVICES["h100"]
TOKENS, WIDTH, INNER, VOCAB = 512, 64, 256, 100
LEAST_BYTES = TOKENS * WIDTH  # far below every activation, above what a norm or a loss saves


class Feed(nn.Module):
    """A network with one layer of each style, of whose memory all is known."""

    tp_plan: ClassVar = {
        "table": "embedding_rowwise",
        "up": "colwise",
        "down": "rowwise",
        "head": "colwise_gather_output",
    }

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.up, self.down, self.head = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH), nn.Linear(WIDTH, VOCAB)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.down(self.up(self.table(tokens)).sigmoid())), tokens)


def seen(ways: int, make: Callable[[], nn.Module] = Feed) -> Observed:
    def subject() -> tuple[nn.Module, Any]:
        return make(), torch.randint(VOCAB, (TOKENS,))

    return observe(subject, CARD, min_tensor_bytes=LEAST_BYTES, tensor=ways)


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def test_each_layer_is_cut_by_its_style() -> None:
    model = Feed()
    cut(model, 4)
    assert shapes(model) == {
        "table.weight": (VOCAB // 4, WIDTH),
        "up.weight": (INNER // 4, WIDTH),
        "up.bias": (INNER // 4,),
        "down.weight": (WIDTH, INNER // 4),
        "down.bias": (WIDTH,),
        "head.weight": (VOCAB // 4, WIDTH),
        "head.bias": (VOCAB // 4,),
    }


def test_a_rank_saves_parts_between_the_layers_and_the_whole_around_them() -> None:
    whole, inner, logits = TOKENS * WIDTH * 4, TOKENS * INNER * 4, TOKENS * VOCAB * 4
    found = {ways: [each.nbytes for each in seen(ways).saved] for ways in (1, 2, 4)}
    # The input of `up`, the output of sigmoid, which is the input of `down`, the input of `head`, and the loss.
    assert found == {ways: [whole, inner // ways, whole, logits] for ways in (1, 2, 4)}


def test_a_rank_has_its_part_of_weights_and_computes_its_part_of_products() -> None:
    one, four = seen(1), seen(4)
    weights = VOCAB * WIDTH + (WIDTH + 1) * INNER + INNER * WIDTH + (WIDTH + 1) * VOCAB
    assert one.weight_bytes == 4 * (weights + WIDTH)
    assert four.weight_bytes == 4 * (weights // 4 + WIDTH)
    assert four.flops * 4 == one.flops
    assert four.parameters == one.parameters == weights + WIDTH  # of the whole model
    assert four.trained == weights // 4 + WIDTH


def test_a_length_that_ranks_cannot_share_evenly_is_cut_as_for_the_first() -> None:
    model = Feed()
    cut(model, 3)
    assert shapes(model)["head.weight"] == (34, WIDTH)
    assert shapes(model)["down.weight"] == (WIDTH, 86)
    assert model(torch.randint(VOCAB, (7,))).shape == ()
    assert model.head(torch.randn(7, WIDTH)).shape == (7, VOCAB)


def test_layers_tied_to_each_other_stay_tied() -> None:
    model = Feed(tied=True)
    cut(model, 2)
    assert model.head.weight is model.table.weight
    assert model.head.weight.shape == (VOCAB // 2, WIDTH)
    assert seen(2, lambda: Feed(tied=True)).weight_bytes < seen(2).weight_bytes


def test_a_plan_of_a_model_holds_where_it_is_a_part_of_another() -> None:
    class Loop(nn.Module):
        tp_plan: ClassVar = {"layers.*": "colwise_gather_output"}

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))

    model = nn.Sequential(Loop(), nn.Linear(8, 8))
    cut(model, 2)
    assert [tuple(each.weight.shape) for each in model[0].layers] == 12 * [(4, 8)]
    assert tuple(model[1].weight.shape) == (8, 8)


class Tied(Feed):
    tp_plan: ClassVar = {"up": "colwise", "down": "rowwise", "head": "colwise_gather_output"}


class Crossed(Feed):
    tp_plan: ClassVar = {"table": "embedding_rowwise", "head": "rowwise_split_input"}


class Routed(Feed):
    tp_plan: ClassVar = {"up": "packed_colwise"}


class Misnamed(Feed):
    tp_plan: ClassVar = {"layers.*.up": "colwise"}


class Headed(Feed):
    tp_plan: ClassVar = {"attention.q": "colwise"}

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"q": nn.Linear(WIDTH, WIDTH)})
        self.config = type("Config", (), {"num_attention_heads": 8, "num_key_value_heads": 2})


@pytest.mark.parametrize(
    ("make", "ways", "says"),
    [
        (lambda: nn.Linear(8, 8), 2, "Linear has no plan of tensor parallelism that names a layer of it"),
        (Misnamed, 2, "Misnamed has no plan of tensor parallelism that names a layer of it"),
        (Routed, 2, "has up, a Linear, as 'packed_colwise' in its tp_plan, which is not forecast"),
        (lambda: Tied(tied=True), 2, "has parameters of table in common with another layer, .* here they are not cut"),
        (lambda: Crossed(tied=True), 2, "has parameters of head in common .* here they are cut another way"),
        (Headed, 4, "has num_key_value_heads=2, which 4 ranks cannot share"),
        (Feed, 128, r"has table of shape \[100, 64\], of which 128 ranks cannot each have a part"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_what_to_do(make: Callable[[], nn.Module], ways: int, says: str) -> None:
    with pytest.raises(ConfigError, match=f"--tp {ways}: .*{says}"):
        cut(make(), ways)


def test_one_rank_needs_no_plan_and_is_not_cut() -> None:
    model = nn.Linear(8, 8)
    before = model.weight
    cut(model, 1)
    assert model.weight is before


def test_a_cpu_is_observed_alike() -> None:
    found = observe(
        lambda: (Feed(), torch.randint(VOCAB, (TOKENS,))),
        replace(CARD, like_cuda=False),
        min_tensor_bytes=LEAST_BYTES,
        tensor=2,
    )
    assert [each.nbytes for each in found.saved] == [each.nbytes for each in seen(2).saved]
