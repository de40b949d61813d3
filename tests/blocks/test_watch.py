"""Where a planned step finds the places of what it saves: `Places`."""

from __future__ import annotations

import torch

from tba._blocks.watch import Given, Places, Watch, by_storage
from tba._plan.facts import OUTSIDE, Place

SHARED = Place(OUTSIDE, -1)


def test_what_a_block_saves_that_runs_again_has_none_of_its_places() -> None:
    places = Places({Place(0, 0): 8, Place(1, 0): 8}, recomputed=frozenset({0}))
    seen = Watch(0.0)
    assert places.find(seen, 0, None, 8) is None
    assert places.find(seen, 1, None, 8) == Place(1, 0)


def test_what_is_shared_is_found_by_its_position_and_once() -> None:
    nbytes = {SHARED: 8, Place(1, 0): 8, Place(1, 1): 8}
    places = Places(nbytes, {Place(0, 2): SHARED}, {(1, 0): Place(0, 2)}, frozenset({0}))
    given, other = torch.zeros(2), torch.zeros(2)
    seen = Watch(0.0, near=by_storage(given), visits=[(lambda: None, 0.0, 0)])  # type: ignore[list-item]
    assert [places.find(seen, 1, root, 8) for root in (other, given, other)] == [Place(1, 0), SHARED, Place(1, 1)]
    assert places.find(seen, 1, given, 8) is None


def test_what_is_shared_but_not_near_is_told_by_its_bytes() -> None:
    nbytes = {SHARED: 8, Place(1, 0): 4, Place(1, 1): 4}
    places = Places(nbytes, {Place(0, 2): SHARED}, recomputed=frozenset({0}))
    seen = Watch(0.0)
    assert [places.find(seen, 1, None, each) for each in (4, 8, 4)] == [Place(1, 0), SHARED, Place(1, 1)]
    assert places.find(seen, 1, None, 8) is None


def test_where_the_block_that_saved_it_first_saves_it_nothing_is_lent() -> None:
    places = Places({SHARED: 8, Place(1, 0): 4}, {Place(0, 2): SHARED})
    assert places.find(Watch(0.0), 1, None, 8) is None


def test_what_blocks_are_given_counts_once() -> None:
    given, mask = Given(), torch.zeros(3)
    x, y = torch.zeros(5), torch.zeros(7)
    assert given.new_bytes([x, mask, x.view(5), x]) == (5 + 3) * 4
    assert given.new_bytes([y, mask]) == 7 * 4
    del y
    assert given.new_bytes([torch.zeros(7), mask]) == 7 * 4  # perhaps where the other was
