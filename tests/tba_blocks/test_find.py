"""Which modules are a model's blocks: found by what they save, not by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tba._blocks import find


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(2, 2), nn.Linear(2, 2)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.more = Inner(), nn.Sequential(nn.Linear(2, 2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Sequential(Outer(), Outer()) for _ in range(2))
        self.alone = Inner()


def test_candidates_repeat_and_have_modules_of_their_own() -> None:
    model = Model()
    found = find.candidates(model)
    assert {type(module) for module in found} == {Inner, Outer}
    assert len(found) == 4 + 5


@pytest.mark.parametrize("how", ["compile", "module", "forward", "class", "whole"])
def test_nothing_inside_what_is_compiled_is_a_candidate(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    if how == "class":
        monkeypatch.setattr(
            Outer, "forward", torch.compile(lambda self, x: self.inner(x), backend="eager"), raising=False
        )
    for stage in model.stages:
        for number, outer in enumerate(stage):
            if how == "compile":
                outer.compile(backend="eager")
            elif how == "module":
                stage[number] = torch.compile(outer, backend="eager")
            elif how == "forward":
                outer.forward = torch.compile(lambda x, inner=outer.inner: inner(x), backend="eager")
    if how == "whole":
        assert find.candidates(torch.compile(model, backend="eager")) == []
        model.compile(backend="eager")
        assert find.candidates(model) == []
    else:
        assert find.candidates(model) == [model.alone]


def test_the_class_that_saves_most_are_the_blocks() -> None:
    model = Model()
    outers = [module for module in model.modules() if isinstance(module, Outer)]
    inners = [module for module in model.modules() if isinstance(module, Inner)]
    assert find.blocks(dict.fromkeys(outers, 10) | dict.fromkeys(inners, 5)) == outers
    # Nearly as much by more, smaller modules: less comes back at once.
    assert find.blocks(dict.fromkeys(outers, 10) | dict.fromkeys(inners, 8)) == inners
    assert find.blocks({}) == []
    assert find.blocks(dict.fromkeys(outers, 0)) == []


def test_parts_of_blocks_are_the_outermost_that_save_a_share_of_them() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.feed, self.small = Outer(), nn.ModuleList([Inner()]), Inner()

    layer, wrapped = Layer(), nn.Module()
    wrapped.inner = Layer()
    attention, feed = layer.attention, layer.feed[0]
    saved = {layer: 100, attention: 60, attention.inner: 50, feed: 10, layer.small: 9}
    assert find.parts([layer], saved) == [attention, feed]
    assert find.parts([layer], saved | {layer.small: 10, attention: 9}) == [attention.inner, feed, layer.small]
    within = {wrapped: 100, wrapped.inner: 95, wrapped.inner.attention: 60}  # a wrapper saves what the block does
    assert find.parts([wrapped], within) == [wrapped.inner.attention]
    assert find.parts([layer, attention], saved) == [attention.inner, feed]  # blocks are no parts
    assert find.parts([layer], {layer: 0, attention: 0}) == []


def test_wrappable() -> None:
    layer = nn.Linear(2, 2)
    assert find.wrappable(layer)
    layer.forward = lambda x: x
    assert not find.wrappable(layer)
    assert torch.equal(layer(torch.ones(2)), torch.ones(2))
