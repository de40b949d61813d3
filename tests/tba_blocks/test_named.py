"""Blocks that a user names: by class, by path or as modules, and what is said where there are none."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.planned import LAYERS, SLOW, Block, Training, assert_equal, saved_bytes, train
from tba import ConfigError, OffloadConfig, Offloader, attach, offload_context


class Pair(nn.Module):
    """Two blocks in a row, and a sequence of them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Block(), nn.Sequential(Block(), nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(x))  # type: ignore[no-any-return]


NAMED: list[tuple[Callable[[nn.Module], Any], int]] = [
    (lambda _: Block, 2 * LAYERS),
    (lambda _: "Block", 2 * LAYERS),
    (lambda _: "support.planned.Block", 2 * LAYERS),
    (lambda _: "layers", LAYERS),
    (lambda model: model.layers, LAYERS),
    (lambda model: list(model.layers), LAYERS),
    (lambda model: [model.layers[2], Pair], LAYERS),
    (lambda model: (layer.one for layer in model.layers), LAYERS),
    (lambda model: [model.layers[1].one, "layers.4.other"], 2),
    (lambda _: "layers.1.other", 2),  # a Sequential named alone stands for what is in it
    (lambda model: [layer.other for layer in model.layers], LAYERS),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("blocks", "count"), NAMED, ids=map(str, range(len(NAMED))))
def test_what_is_named_is_what_recomputes(
    auto: Callable[..., Offloader], blocks: Callable[[nn.Module], Any], count: int
) -> None:
    training = Training(Pair)
    offload = auto(
        training.model, memory_budget=int(1.2 * saved_bytes()), blocks=blocks(training.model), derive=False, **SLOW
    )
    assert_equal(train(offload, training), train(None, Training(Pair)))
    assert offload.plan
    assert len(offload.plan.facts.blocks) == count
    assert offload.plan.recomputed


def test_settings_hold_names_and_are_values(monkeypatch: pytest.MonkeyPatch) -> None:
    config = OffloadConfig(blocks=[Block, "head"])
    assert config.blocks == ("support.planned.Block", "head")
    assert config == pickle.loads(pickle.dumps(config)) == copy.copy(config)
    assert hash(config) == hash(OffloadConfig(blocks="support.planned.Block, head"))
    monkeypatch.setenv("TBA_BLOCKS", "layers,Block")
    assert OffloadConfig().blocks == ("layers", "Block")
    assert OffloadConfig(blocks=None).blocks is None


def test_named_blocks_of_one_model_are_one_context(auto: Callable[..., Offloader]) -> None:
    model = Training().model
    one = auto(model, memory_budget="1MiB", blocks=list(model.layers))
    assert auto(model, memory_budget="1MiB", blocks=tuple(model.layers)) is one
    assert auto(model, memory_budget="1MiB", blocks=list(model.layers)[1:]) is not one
    assert auto(model, memory_budget="1MiB", config=OffloadConfig(blocks="Block")).config.blocks == ("Block",)


def test_attach_takes_blocks_too(scratch: Path) -> None:
    training = Training()
    budget, settings = int(0.4 * saved_bytes()), {"storage_paths": scratch, "min_tensor_bytes": 4096, **SLOW}
    offload = attach(training.model, "auto", memory_budget=budget, blocks="layers", **settings)
    assert_equal(train(None, training), train(None, Training()))
    assert offload.plan
    assert len(offload.plan.facts.blocks) == LAYERS
    offload.close()


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ("layer", r"blocks='layer' names no class of modules in Net, and no path to one; the nearest it has: 'layers'"),
        ("block", r"blocks='block' names no class of modules in Net, .* the nearest it has: .*'Block'"),
        ("x.y", r"the nearest it has: 'Block', 'layers'"),
        (nn.Conv2d, r"blocks='torch.nn.modules.conv.Conv2d' names no class"),
        (nn.Linear(2, 2), r"blocks: a Linear was given that is no module inside of the Net"),
        ("", r"blocks='' is not a class of modules or its name, .*: it names nothing"),
        (3, r"blocks=3 is not a class of modules or its name"),
        ([3], r"blocks=.* is not a class of modules or its name"),
    ],
)
def test_what_is_not_there_is_an_error(auto: Callable[..., Offloader], blocks: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        auto(Training().model, memory_budget="1MiB", blocks=blocks)


def test_what_cannot_recompute_is_an_error(auto: Callable[..., Offloader]) -> None:
    model = Training().model
    for layer in model.layers:
        layer.compile(backend="eager")
    with pytest.raises(
        ConfigError, match=rf"blocks='support.planned.Block' names {LAYERS} modules of Net, none of which can recompute"
    ):
        auto(model, memory_budget="1MiB", blocks=Block)
    with pytest.raises(ConfigError, match=r"blocks='layers.0.up' names 1 modules .* they are compiled, part of a"):
        auto(model, memory_budget="1MiB", blocks="layers.0.up")
    with pytest.raises(ConfigError, match=r"'layers.0',.* without a model"):
        offload_context(None, "auto", blocks="layers.0")
    with pytest.raises(ConfigError, match=r"is no module inside of the Net"):
        auto(model, blocks=model)  # which is not inside itself


def test_other_tiers_have_no_blocks() -> None:
    with pytest.raises(ConfigError, match=r"blocks=.* was given with tier='nvme', under which nothing recomputes"):
        OffloadConfig(tier="nvme", blocks="Block")
    with pytest.raises(ConfigError, match="only offload_context"):
        OffloadConfig(blocks=[torch.nn.Linear(2, 2)])
