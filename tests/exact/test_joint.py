"""Tensors that one call of compiled code saves share a record, though each has a version counter of its own.

`Parts` stands for compiled code: torch marks the Functions that it makes of that with `_aot_id`, as it is marked here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.compiled import call
from support.engine import Gate, activation, engine, save
from support.exactness import assert_bit_equal

# A step with nothing but compiled code is told that it moves in vain.
pytestmark = pytest.mark.filterwarnings("ignore:.*compiled as one graph:tba.OffloadWarning")

ROWS, WIDTH = 16, 24
X_BYTES = ROWS * WIDTH * 4


class Separate(torch.autograd.Function):
    """x [B, 3W] -> the product of its three parts [B, W], which it saves: tensors of their own over one memory."""

    seen: tuple[Tensor, ...] = ()  # what the last backward was given

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: list[Tensor]) -> Tensor:
        parts = torch.unsafe_chunk(x * 1, 3, dim=1)
        kept.extend(parts)
        ctx.save_for_backward(*parts)
        first, second, third = parts
        return first * second * third

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        first, second, third = Separate.seen = ctx.saved_tensors
        (gradient,) = gradients
        return torch.cat([second * third, first * third, first * second], dim=1) * gradient.repeat(1, 3), None


class Parts(Separate):
    """`Separate` as compiled code."""

    _aot_id = 0


def _gradient(x: Tensor, out: Tensor) -> Tensor:
    return torch.autograd.grad(out.sum(), x)[0]


def _expected(x: Tensor) -> Tensor:
    return _gradient(x, Separate.apply(x, []))


def _memories(tensors: tuple[Tensor, ...]) -> int:
    return len({tensor.untyped_storage().data_ptr() for tensor in tensors})


@pytest.fixture(autouse=True)
def _nothing_seen() -> Any:
    yield
    Separate.seen = ()


@pytest.mark.parametrize("settings", [{}, {"compress": "exact"}, {"prefetch_bytes": 0}], ids=str)
def test_parts_of_one_storage_saved_by_compiled_code_are_written_once(scratch: Path, settings: dict[str, Any]) -> None:
    _, x = activation(ROWS, WIDTH)
    expected = _expected(x)
    with engine(scratch, **settings) as offload:
        with offload:
            out = call(Parts, x, [])
        offload.flush()
        stats = offload.stats()
        assert stats.live_records == 1
        assert stats.offloaded_bytes == X_BYTES // 3
        assert stats.duplicate_bytes == 2 * X_BYTES // 3
        assert_bit_equal(_gradient(x, out), expected)
        assert _memories(Separate.seen) == 1  # as in plain PyTorch, not three times what each spans
        assert offload.stats().read_bytes == offload.stats().written_bytes > 0


def test_parts_saved_by_a_function_of_the_program_are_told_apart(scratch: Path) -> None:
    _, x = activation(ROWS, WIDTH)
    with engine(scratch) as offload, offload:
        out = Separate.apply(x, [])
        assert offload.stats().live_records == 3
        assert offload.stats().duplicate_bytes == 0
        assert_bit_equal(_gradient(x, out), _expected(x))


@pytest.mark.parametrize("edited", range(3))
def test_an_edit_through_any_part_before_the_copy_is_finished_is_an_error(scratch: Path, edited: int) -> None:
    _, x = activation(ROWS, WIDTH)
    gate, parts = Gate("write"), list[Tensor]()
    with engine(scratch, gate, prefetch_bytes=0) as offload:
        with offload:
            out = call(Parts, x, parts)
        parts[edited].add_(1)
        gate.open()
        offload.flush()
        with pytest.raises(RuntimeError, match="version 1; expected version 0"):
            out.sum().backward()


@pytest.mark.parametrize("edited", range(3))
def test_an_edit_after_the_copy_is_legal_and_a_later_save_is_another_record(scratch: Path, edited: int) -> None:
    _, x = activation(ROWS, WIDTH)
    expected, parts = _expected(x), list[Tensor]()
    with engine(scratch) as offload:
        with offload:
            out = call(Parts, x, parts)
            offload.flush()
            parts[edited].add_(1)
            first = parts[0].requires_grad_()
            again = save(first)
        assert offload.stats().live_records == 2
        offload.flush()
        assert_bit_equal(_gradient(first, again), 2 * first.detach())
        assert_bit_equal(_gradient(x, out), expected)


def test_another_operator_finds_the_record_of_the_first_part(scratch: Path) -> None:
    _, x = activation(ROWS, WIDTH)
    parts = list[Tensor]()
    with engine(scratch) as offload:
        with offload:
            out = call(Parts, x, parts)
            first = parts[0].requires_grad_()
            again = save(first)
        assert offload.stats().live_records == 1
        offload.flush()
        assert_bit_equal(_gradient(x, out), _expected(x))
        assert_bit_equal(_gradient(first, again), 2 * first.detach())


@pytest.mark.parametrize("kept", [False, True], ids=["theirs alone", "the program's too"])
@pytest.mark.parametrize("flush", [False, True], ids=["in memory", "read back"])
def test_compiled_code_gets_memory_of_its_own(scratch: Path, kept: bool, flush: bool) -> None:
    """Compiled code writes to it, which neither the program's tensors nor a later backward may see."""
    _, x = activation(ROWS, WIDTH)
    expected, parts = _expected(x), list[Tensor]()
    with engine(scratch) as offload:
        with offload:
            out = call(Parts, x, parts)
        before = [part.clone() for part in parts]
        if not kept:
            parts.clear()
        if flush:
            offload.flush()
        for retain in (True, False):
            (gradient,) = torch.autograd.grad(out.sum(), x, retain_graph=retain)
            assert_bit_equal(gradient, expected)
            for tensor in Separate.seen:
                tensor.fill_(float("nan"))
        if kept:
            assert_bit_equal([part.clone() for part in parts], before)
        else:
            assert _memories(Separate.seen) == 1
            assert (offload.stats().read_bytes == 0) is not flush


def test_a_second_unpack_reads_what_was_saved(scratch: Path) -> None:
    class Twice(Parts):
        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
            for tensor in ctx.saved_tensors:
                tensor.fill_(float("nan"))
            return Parts.backward(ctx, *gradients)

    _, x = activation(ROWS, WIDTH)
    with engine(scratch) as offload:
        with offload:
            out = Twice.apply(x, [])
        offload.flush()
        assert_bit_equal(_gradient(x, out), _expected(x))
