"""Inputs of blocks: what counts once, and what of it may move."""

from __future__ import annotations

import torch

from tba._blocks.given import Given


def test_what_blocks_are_given_counts_once() -> None:
    given, mask = Given(), torch.zeros(3)
    x, y = torch.zeros(5), torch.zeros(7)
    assert given.take([x, mask, x.view(5), x]).nbytes == (5 + 3) * 4
    assert given.take([y, mask]).nbytes == 7 * 4
    del y
    assert given.take([torch.zeros(7), mask]).nbytes == 7 * 4  # perhaps where the other was


def test_of_an_input_only_whole_tensors_of_one_block_may_move() -> None:
    given, mask, weight = Given(least_bytes=16), torch.zeros(8), torch.zeros(8, requires_grad=True)
    x = torch.zeros(8)
    first = given.take([x, mask, x.view(2, 4), x])
    assert (first.nbytes, first.stays_bytes) == (64, 0)
    second = given.take([torch.zeros(9)[1:], torch.zeros(3), mask, weight, torch.zeros(1).expand(8)])
    assert (second.nbytes, second.stays_bytes) == (32 + 12 + 32 + 4, 32 + 12 + 32 + 4)
    assert (first.small_bytes, second.small_bytes) == (0, 12 + 4)
    assert (first.nbytes, first.stays_bytes) == (64, 32)  # the mask is wanted by the first block of backward
    given.take([mask])
    assert first.stays_bytes == 32


def test_slices_of_one_storage_count_with_what_each_of_them_has() -> None:
    together = torch.zeros(24)
    found = Given().take([together[:8], together[8:]])
    assert found.nbytes == found.stays_bytes == 96


def test_of_two_views_that_make_up_an_input_either_tells_that_another_block_is_given_it() -> None:
    x, given = torch.zeros(8), Given(least_bytes=16)
    view = x.view(2, 4)
    first = given.take([x, view])
    given.take([view])
    assert first.stays_bytes == first.nbytes == 32
