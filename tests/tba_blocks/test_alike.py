"""Layers of one class that save the same are taken to take equally long."""

from __future__ import annotations

from tba._blocks.alike import evened, evened_layers
from tba._plan.facts import Block, Place, Saved


def test_a_time_that_is_not_far_from_the_median_of_its_kind_is_noise() -> None:
    times_s = [("a", 1.0), ("a", 1.5), ("b", 9.0), ("a", 0.9), ("a", None), ("a", 5.0)]
    assert evened(times_s) == [1.25, 1.25, 9.0, 1.25, None, 5.0]


def test_every_other_layer_that_takes_much_longer_keeps_its_time() -> None:
    times_s = [("layer", each) for each in (1.0, 4.0, 1.2, 4.4, 1.1)]
    assert evened(times_s) == [1.2, 4.0, 1.2, 4.4, 1.2]


def _saved(block: int, number: int, nbytes: int, derive_s: float | None = None) -> Saved:
    return Saved(Place(block, number), nbytes, 0.0, 0.0, nbytes, derive_s=derive_s)


def test_layers_are_alike_that_have_one_class_and_save_the_same() -> None:
    saved = (
        *(_saved(0, 0, 8), _saved(0, 1, 4, 1.0)),
        *(_saved(1, 0, 8), _saved(1, 1, 4, 2.0), _saved(-1, 0, 4, 7.0)),
        *(_saved(2, 0, 8), _saved(2, 1, 5, 4.0)),
        *(_saved(3, 0, 8), _saved(3, 1, 4, 3.0)),
    )
    blocks = [
        *(Block(0.0, each, 8) for each in (10.0, 12.0, 14.0, 16.0)),
        *(Block(0.0, each, 8, within=at, kind="Part", first=1, last=2) for at, each in enumerate((1.0, 1.2, 1.4, 1.5))),
    ]
    kinds = ["Layer", "Layer", "Layer", "Other", *["Part"] * 4]
    evened_saved, evened_blocks = evened_layers(saved, blocks, kinds)
    assert [each.derive_s for each in evened_saved] == [None, 1.5, None, 1.5, 7.0, None, 4.0, None, 3.0]
    assert [block.replay_s for block in evened_blocks] == [11.0, 11.0, 14.0, 16.0, 1.2, 1.2, 1.4, 1.2]
