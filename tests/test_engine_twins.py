"""Invariant 2 where tensors share a storage but no base: detached (ZeRO-3's modules), given the memory (Megatron's)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_tools import Gate, activation, engine, save
from helpers import assert_bit_equal, assert_through_file
from torch import Tensor

MODIFIED = "modified by an inplace operation"


class Detach(torch.autograd.Function):
    """What DeepSpeed's ZeRO-3 puts around every module: the same memory and version counter, another tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Viewless(torch.autograd.Function):
    """What Megatron makes of a layer's output: the same memory, another version counter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty(1, dtype=x.dtype)
        out.data = x.data
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


WAYS = pytest.mark.parametrize("alias", [Detach.apply, Viewless.apply], ids=["detached", "viewless"])
Alias = Callable[[Tensor], Tensor]


@WAYS
@pytest.mark.parametrize("settings", [{}, {"compress": "exact"}, {"tier": "auto"}], ids=["nvme", "exact", "auto"])
def test_2_what_is_saved_under_several_names_is_one_record(
    scratch: Path, alias: Alias, settings: dict[str, Any]
) -> None:
    with engine(scratch, **settings) as offload:
        leaf, x = activation(64, 64)
        with offload:
            query, key, value = save(alias(x)), save(alias(x).t()), save(alias(x)[1:])
        stats = offload.stats()
        assert stats.live_records == 1
        assert stats.duplicate_bytes == 2 * x.nbytes - 64 * 4
        del x
        offload.flush()
        (query.sum() + key.sum() + value.sum()).backward()
        expected = 4 * leaf.detach()
        expected[1:] += 2 * leaf.detach()[1:]
        assert_bit_equal(leaf.grad, expected)
        if not settings:
            assert_through_file(offload.stats())


def test_8_a_record_does_not_collect_names_for_good(scratch: Path) -> None:
    with engine(scratch) as offload:
        leaf, x = activation(64, 64)
        with offload:
            results = [save(x), *(save(Detach.apply(x)) for _ in range(40))]
        assert offload.stats().live_records == 3  # of seventeen names at most
        offload.flush()
        for result in results:
            (gradient,) = torch.autograd.grad(result.sum(), x)
            assert_bit_equal(gradient, 2 * leaf.detach())


@WAYS
def test_2_one_that_was_met_in_memory_is_known_once_the_copy_is_made(scratch: Path, alias: Alias) -> None:
    with engine(scratch) as offload:
        leaf, x = activation(64, 64)
        twin = alias(x)
        with offload:
            first = save(x) + save(twin)
            offload.flush()
            second = save(twin)
            offload.flush()
        stats = offload.stats()
        assert (stats.live_records, stats.duplicate_bytes) == (1, 2 * x.nbytes)
        (first + second).sum().backward()
        assert_bit_equal(leaf.grad, 6 * leaf.detach())
        assert_through_file(offload.stats())


@WAYS
@pytest.mark.parametrize("first", [True, False], ids=["first", "second"])
def test_5_an_edit_that_either_counts_is_noticed(scratch: Path, alias: Alias, first: bool) -> None:
    gate = Gate("write")
    with engine(scratch, gate, prefetch_bytes=0) as offload:
        _, x = activation(4096)
        twin = alias(x)
        with offload:
            result = save(x)
            other = save(twin)
            _ = save(x * 1)  # the operator after: now the write is submitted
        assert offload.stats().live_records == 2
        with torch.no_grad():
            (x if first else twin).add_(1)
        gate.open()
        offload.flush()
        for graph in (other, result):
            with pytest.raises(RuntimeError, match=f"(?s){MODIFIED}.*is at version 1; expected version 0"):
                graph.sum().backward()


@WAYS
def test_5_an_edit_of_a_twin_after_the_copy_has_finished_is_legal(scratch: Path, alias: Alias) -> None:
    with engine(scratch) as offload:
        leaf, x = activation(4096)
        twin = alias(x)
        with offload:
            result = save(x) + save(twin)
        offload.flush()
        with torch.no_grad():
            twin.zero_()
        result.sum().backward()
        assert_bit_equal(leaf.grad, 4 * leaf.detach())


@pytest.mark.parametrize("moved", [False, True])
def test_2_what_only_the_twin_has_counted_is_in_its_bytes(scratch: Path, moved: bool) -> None:
    """An edit between the two saves, through a counter of its own: in memory both see it, in a copy only the later."""
    with engine(scratch) as offload:
        leaf, x = activation(4096)
        twin = Viewless.apply(x)
        with offload:
            first = save(x)
            if moved:
                offload.flush()
            with torch.no_grad():
                twin.mul_(2)
            second = save(twin)
        assert offload.stats().live_records == 2
        offload.flush()
        (one,) = torch.autograd.grad(first.sum(), x, retain_graph=True)
        assert_bit_equal(one, (2 if moved else 4) * leaf.detach())
        (other,) = torch.autograd.grad(second.sum(), twin, allow_unused=True)
        assert_bit_equal(other, 4 * leaf.detach())


def test_2_a_lossy_preset_does_not_depend_on_what_is_still_in_memory(scratch: Path) -> None:
    with engine(scratch, tier="keep", compress="safe8") as offload:
        _, x = activation(64, 64)
        with offload:
            result = save(x) + save(Detach.apply(x))
        assert offload.stats().live_records == 2
        del result


@pytest.mark.parametrize("tier", ["nvme", "keep"])
def test_2_what_is_made_again_is_what_was_saved_first(scratch: Path, tier: str) -> None:
    """A twin that was edited between the two saves, through its own counter, is no part of that."""
    with engine(scratch, tier=tier, compress="exact") as offload:
        for step in range(3):
            _, x = activation(64, 64)
            with offload:
                result = torch.nn.functional.gelu(x * 1)
                first = save(result)
                twin = Viewless.apply(result)
                if step == 2:
                    with torch.no_grad():
                        twin.mul_(2)
                second = save(twin)
            expected = 2 * twin.detach()
            offload.flush()
            (gradient,) = torch.autograd.grad(second.sum(), twin)
            assert_bit_equal(gradient, expected)
            first.sum().backward()
        assert offload.stats().derived_bytes > 0
