"""Where a planned step finds the places of what it saves: `Places`; what a watched one says that a replay takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tba._blocks.given import Input
from tba._blocks.shared_storages import AtHand, SharedStorages
from tba._blocks.trial import Verdict
from tba._blocks.watch import Places, Watch
from tba._plan.facts import OUTSIDE, Link, Place, input_place

SHARED = Place(OUTSIDE, -1)
NOTHING = AtHand()


def shared(at_hand: AtHand = NOTHING, root: torch.Tensor | None = None) -> SharedStorages:
    """What the first block saves third, and the second again, where it is at hand."""
    made = SharedStorages()
    made.again(7, at_hand.where(1, root))
    made.settle({7: Place(0, 2), 8: Place(1, 0)})
    assert made.outside == {Place(0, 2): SHARED}
    return made


def test_what_a_block_saves_that_runs_again_has_none_of_its_places() -> None:
    places = Places({Place(0, 0): 8, Place(1, 0): 8}, recomputed=frozenset({0}))
    seen = Watch(0.0)
    assert places.find(seen, 0, NOTHING, None, 8) is None
    assert places.find(seen, 1, NOTHING, None, 8) == Place(1, 0)


def test_an_input_that_is_to_go_is_found_until_all_of_it_has_been_saved() -> None:
    shares, two = shared(), frozenset({0, 2})
    places = Places({SHARED: 8, Place(1, 0): 8}, shares, two, {input_place(2): 12})
    seen = Watch(0.0)
    assert places.find(seen, 0, NOTHING, None, 8) is None  # it stays
    assert places.find(seen, 1, NOTHING, None, 8) == Place(1, 0)
    found = [places.find(seen, 2, NOTHING, None, nbytes) for nbytes in (8, 8, 4, 4)]
    assert found == [input_place(2), None, input_place(2), None]


def test_what_is_shared_is_found_by_its_position_and_once() -> None:
    nbytes = {SHARED: 8, Place(1, 0): 8, Place(1, 1): 8}
    given, other = torch.zeros(2), torch.zeros(2)
    at_hand = AtHand((given, 1.0))
    places = Places(nbytes, shared(at_hand, given), frozenset({0}))
    seen = Watch(0.0, visits=[(lambda: None, 0.0, Input())])  # type: ignore[list-item]
    found = [places.find(seen, 1, at_hand, root, 8) for root in (other, given, other)]
    assert found == [Place(1, 0), SHARED, Place(1, 1)]
    assert places.find(seen, 1, at_hand, given, 8) is None


def test_what_is_at_hand_is_known_while_it_lives() -> None:
    tensors = [torch.zeros(2), torch.zeros(3)]
    at_hand, other = AtHand({"one": tensors[0], "other": [tensors[1]]}), tensors[1].detach()
    assert at_hand.where(4, other) == (4, 1)
    assert at_hand.where(4, torch.zeros(2)) is None
    assert at_hand.where(4, None) is None
    tensors.clear()
    assert at_hand.where(4, other) is None  # another may have the id of its storage by now


def test_what_is_shared_but_not_near_is_told_by_its_bytes() -> None:
    nbytes = {SHARED: 8, Place(1, 0): 4, Place(1, 1): 4}
    places = Places(nbytes, shared(), frozenset({0}))
    seen = Watch(0.0)
    found = [places.find(seen, 1, NOTHING, None, each) for each in (4, 8, 4)]
    assert found == [Place(1, 0), SHARED, Place(1, 1)]
    assert places.find(seen, 1, NOTHING, None, 8) is None


def test_where_the_block_that_saved_it_first_saves_it_nothing_is_lent() -> None:
    places = Places({SHARED: 8, Place(1, 0): 4}, shared())
    assert places.find(Watch(0.0), 1, NOTHING, None, 8) is None


def test_a_replay_takes_what_its_trial_took_where_transfers_hide_what_forward_took() -> None:
    """Four calls of a block, four seconds each, of which transfers that end in two of them take almost all away."""
    block = torch.nn.Identity()
    seen = Watch(0.0, asked={0: 8.0, 1: 9.0})
    for visit, begin_s in enumerate((0.0, 4.0, 1.0, 1.5)):
        seen.visit(block, begin_s, ())
        trial: Any = SimpleNamespace(verdict=Verdict(1.5 if visit < 3 else 9.0))
        seen.trials[visit] = trial
    facts = seen.facts(Link(1e9, 1e9), 0)
    assert [each.replay_s for each in facts.blocks] == [1.5, 1.5, 1.5, 4.0]  # beside transfers the last trial was slow
