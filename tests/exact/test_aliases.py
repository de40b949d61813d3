"""Tensors that share a storage but no base: each is what it was when it was saved, by its own version counter.

Detached (ZeRO-3's modules), given the memory through `.data` (Megatron's layers), or split unsafely (recurrent cells).
One counts edits that the other does not. Every program gives what plain PyTorch gives.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from campaigns.programs.operators import Detach
from support.engine import activation, engine, save
from support.exactness import assert_bit_equal
from support.stores import Held
from tba import OffloadConfig, Offloader


class Viewless(Detach):
    """A tensor in the memory of `x` with a version counter of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty(1, dtype=x.dtype)
        out.data = x.data
        return out


Step = Callable[[Tensor, Callable[[], None]], Tensor]


def _one_under_many_names(x: Tensor, flush: Callable[[], None]) -> Tensor:
    names = [x, Detach.apply(x), Viewless.apply(x), Detach.apply(x).t(), Viewless.apply(x)[1:]]
    results = [save(name).sum() for name in names]
    flush()
    return torch.autograd.grad(torch.stack(results).sum(), x)[0]


def _edited_by_its_own_counter_before_it_is_saved(x: Tensor, flush: Callable[[], None]) -> Tensor:
    y = Viewless.apply(x)
    first = save(x)
    with torch.no_grad():
        y.mul_(2)
    second = save(y)
    flush()
    del first
    return torch.autograd.grad(second.sum(), y)[0]


def _saved_again_after_the_other_was_edited(x: Tensor, flush: Callable[[], None]) -> Tensor:
    y = Viewless.apply(x)
    kept, gone = save(x), save(y)
    del gone
    flush()
    gradient = _of_one_saved_after_an_edit(x, y, flush)
    del kept
    return gradient


def _first_gone_then_edited_in_memory(x: Tensor, flush: Callable[[], None]) -> Tensor:
    y = Viewless.apply(x)
    gone, kept = save(x), save(y)
    del gone
    gradient = _of_one_saved_after_an_edit(x, y, flush)
    del kept
    return gradient


def _of_one_saved_after_an_edit(x: Tensor, y: Tensor, flush: Callable[[], None]) -> Tensor:
    with torch.no_grad():
        x.add_(1)
    again = save(y)
    flush()
    return torch.autograd.grad(again.sum(), y)[0]


def _columns(x: Tensor, flush: Callable[[], None]) -> Tensor:
    left, right = torch.unsafe_chunk(x, 2, dim=1)
    kept = save(left)
    (gradient,) = torch.autograd.grad(save(right).sum(), right)
    with torch.no_grad():
        right.sub_(gradient, alpha=0.1)
    again = save(right)
    flush()
    return torch.autograd.grad(kept.sum() + again.sum(), x)[0]


def _rows(x: Tensor, flush: Callable[[], None]) -> Tensor:
    above, below = torch.unsafe_split_with_sizes(x, [40, 24])
    kept, gone = save(above), save(below)
    del gone
    with torch.no_grad():
        below.add_(1)
    flush()
    return torch.autograd.grad(kept.sum(), x)[0]


PROGRAMS: list[Step] = [
    _one_under_many_names,
    _edited_by_its_own_counter_before_it_is_saved,
    _saved_again_after_the_other_was_edited,
    _first_gone_then_edited_in_memory,
    _columns,
    _rows,
]
SETTINGS: dict[str, dict[str, Any]] = {
    "nvme": {},
    "nothing held": {"prefetch_bytes": 0},
    "auto": {"tier": "auto"},
    "exact": {"compress": "exact"},
    "keep exact": {"tier": "keep", "compress": "exact"},
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_tensors_without_a_common_base_are_told_apart(scratch: Path, program: Step, settings: dict[str, Any]) -> None:
    expected = program(activation(64, 64)[1], lambda: None)
    with engine(scratch, **settings) as offload:
        for _ in range(2):
            with offload:
                found = program(activation(64, 64)[1], offload.flush)
            assert_bit_equal(found, expected)


def test_an_edit_between_columns_while_they_are_written_is_no_damage_of_theirs(scratch: Path) -> None:
    """The range that is written has bytes of the other tensor, whose checksum would have been taken before the edit."""
    held = Held()
    left, right = torch.unsafe_chunk(activation(64, 64)[1], 2, dim=1)
    config = OffloadConfig(tier="nvme", min_tensor_bytes=0, prefetch_bytes=0)
    offload = Offloader(None, config, store=held.store(scratch))
    with offload:
        kept = save(left)
        other = save(activation(8, 8)[1])
        held.await_begun()
        with torch.no_grad():
            right.add_(1)
        held.release.set()
        offload.flush()
    assert_bit_equal(torch.autograd.grad(kept.sum(), left)[0], 2 * left.detach())
    del other
    offload.close()


@pytest.mark.parametrize("tier", ["nvme", "keep"])
def test_a_derived_alias_is_what_was_saved_first(scratch: Path, tier: str) -> None:
    """A tensor that was edited between the two saves, through its own counter, is no part of that."""
    with engine(scratch, tier=tier, compress="exact", verify="full") as offload:
        for step in range(3):
            _, x = activation(64, 64)
            with offload:
                result = functional.gelu(x * 1)
                first = save(result)
                other = Viewless.apply(result)
                if step == 2:
                    with torch.no_grad():
                        other.mul_(2)
                second = save(other)
            expected = 2 * other.detach()
            offload.flush()
            (gradient,) = torch.autograd.grad(second.sum(), other)
            assert_bit_equal(gradient, expected)
            first.sum().backward()
        assert offload.stats().derived_bytes > 0


@pytest.mark.parametrize("tier", ["nvme", "keep"])
def test_places_in_the_step_do_not_depend_on_what_is_in_memory(scratch: Path, tier: str) -> None:
    """Else a derivation that was compared at one place would be trusted at another, where it is wrong."""

    def step(flush: Callable[[], None]) -> Tensor:
        _, x = activation(64, 64)
        first = save(x)
        flush()
        second = save(Detach.apply(x))
        right = save(functional.silu(x).neg())
        edited = functional.silu(x)
        with torch.no_grad():
            edited.mul_(3)  # nobody has saved it: no trace
        wrong = save(edited.neg())
        del first, second, right
        return torch.autograd.grad(wrong.sum(), x)[0]

    expected = step(lambda: None)

    with engine(scratch, tier=tier, compress="exact") as offload:
        for flush in (offload.flush, lambda: None):
            with offload:
                found = step(flush)
            assert_bit_equal(found, expected)


@pytest.mark.parametrize("alias", [Tensor.detach, Detach.apply, Viewless.apply, lambda x: x.detach().t()])
@pytest.mark.parametrize("settings", [{}, {"compress": "exact"}, {"tier": "auto"}], ids=str)
def test_an_alias_of_bytes_not_yet_copied_moves_once(
    scratch: Path, settings: dict[str, Any], alias: Callable[[Tensor], Tensor]
) -> None:
    _, x = activation(64, 64)
    with engine(scratch, **settings) as offload:
        with offload:
            results = [save(x), save(alias(x).detach().requires_grad_())]
        stats = offload.stats()
        assert stats.live_records == 1
        assert stats.duplicate_bytes == x.nbytes
        offload.flush()
        for result in results:
            result.sum().backward()


def test_an_edit_through_a_saved_alias_is_an_error_for_both(scratch: Path) -> None:
    """PyTorch raises for the alias; for the other it computes with the edited values."""
    _, x = activation(64, 64)
    with engine(scratch, tier="auto") as offload:
        with offload:
            y = Viewless.apply(x).detach()
            results = [save(x), save(y.requires_grad_())]
        with torch.no_grad():
            y.add_(1)
        for result in results:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                result.sum().backward()
