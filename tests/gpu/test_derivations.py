"""Derivations on a device: what its own clock says that they take, and that what they give is right or an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from support.edits import CASES, PROVEN, assert_right_or_refused
from support.engine import parts_of
from support.exactness import assert_bit_equal
from support.gpu import DEVICE, gpu_only, leaf_of, offloader
from support.planned import ROWS, WIDTH, Edited, Training, assert_equal, follow, only_deriving, saved_bytes, train
from tba import EditedError, OffloadConfig, Offloader

pytestmark = gpu_only

ON_DEVICE = [case for case in CASES if case[0] != "numpy"]


def net(x: Tensor) -> Tensor:
    for _ in range(12):
        x = functional.gelu(functional.silu(x * 1.0) * 2.0)
    return x.sum()


def test_derivations_are_timed_by_the_device_and_change_no_bit(scratch: Path) -> None:
    expected = torch.autograd.grad(net(leaf := leaf_of(elements=1 << 14)), leaf)[0]
    with offloader("nvme", scratch, compress="exact") as offload:
        for _ in range(3):
            leaf.grad = None
            with offload:
                loss = net(leaf)
            offload.flush()
            loss.backward()
            assert_bit_equal(leaf.grad, expected)
        worth = parts_of(offload).worth
        assert worth.derived_bytes > 0
        assert 0 < worth.derive_s < 60
    assert leaf.grad is not None
    assert leaf.grad.device == DEVICE


@pytest.mark.sampled(20)
@pytest.mark.parametrize(("edit", "what", "when", "raises"), ON_DEVICE)
def test_an_edit_without_a_trace_gives_plain_gradients_or_the_error(
    edit: str, what: str, when: str, raises: bool, scratch: Path
) -> None:
    """A layer norm's outcome is compared in each step, which finds what is edited at once."""
    raises = raises and (what, when) != ("normed", "at once")
    with offloader("keep", scratch, compress="exact") as offload:
        assert_right_or_refused(offload, edit, what, when, raises=raises, device=DEVICE)


def twice(x: Tensor) -> tuple[Tensor, Tensor]:
    y = functional.gelu(x)
    return y.square(), y.sin()


def proven(offload: Offloader, leaf: Tensor) -> tuple[Tensor, Tensor]:
    """Take some steps; two results of one more, in which nothing is known of GELU's outcome but sums, and it is wrong.

    Both have saved it. The second is asked for its gradient first.
    """
    for _ in range(PROVEN):
        with offload:
            first, second = twice(leaf * 1.0)
        offload.flush()
        (first + second).sum().backward()
    leaf.grad = None
    with offload:
        source = leaf * 1.0
        results = twice(source)
    offload.flush()
    source.data.neg_()
    return results


def fail(gradients: tuple[Tensor, ...]) -> None:
    raise ValueError("fails")


def test_who_asks_for_a_wrong_tensor_outside_of_a_backward_gets_the_error(scratch: Path) -> None:
    with offloader("keep", scratch, compress="exact") as offload:
        node = proven(offload, leaf_of(elements=1 << 14))[0].grad_fn
        with pytest.raises(EditedError):
            node._saved_self  # type: ignore[union-attr]  # noqa: B018


def test_each_backward_that_uses_a_wrong_tensor_raises_also_after_one_that_failed(scratch: Path) -> None:
    with offloader("keep", scratch, compress="exact") as offload:
        first, second = proven(offload, leaf_of(elements=1 << 14))
        first.grad_fn.register_prehook(fail)  # type: ignore[union-attr]
        with pytest.raises(ValueError, match="fails"):
            (first + second).sum().backward(retain_graph=True)
        for _ in range(2):
            with pytest.raises(EditedError):
                second.sum().backward(retain_graph=True)


def test_backwards_that_fail_leave_nothing_that_grows(scratch: Path) -> None:
    leaf = leaf_of(elements=1 << 14)
    with offloader("keep", scratch, compress="exact") as offload:
        first, second = proven(offload, leaf)
        first.grad_fn.register_prehook(fail)  # type: ignore[union-attr]
        for _ in range(70):
            with pytest.raises(ValueError, match="fails"):
                (first + second).sum().backward(retain_graph=True)
        assert 0 < len(parts_of(offload).derivations._outcomes._open) <= 64  # type: ignore[union-attr]
        with offload:
            first, second = twice(leaf * 1.0)
        (first + second).sum().backward()  # hears of none of those


MakeAuto = Callable[[nn.Module], Offloader]


@pytest.fixture
def auto(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> MakeAuto:
    """An engine with a budget that a step exceeds by three of its largest tensors, whose plans only derive."""
    only_deriving(monkeypatch)
    budget = saved_bytes(Edited) - 3 * ROWS * 4 * WIDTH * 4
    config = OffloadConfig(tier="auto", memory_budget=budget, min_tensor_bytes=4096, storage_paths=scratch)
    return lambda model: Offloader(model, config)


def test_a_plan_derives_what_is_cheap(auto: MakeAuto) -> None:
    training = Training(Edited, device=DEVICE)
    offload = auto(training.model)
    try:
        plan = follow(offload, training, 7)[-1]
        assert_equal(training.state(), train(None, Training(Edited, device=DEVICE), steps=7))
        assert plan
        assert plan.derived
        assert plan.fits
        assert plan.measured is not None
        assert plan.measured.peak_bytes <= plan.budget_bytes
    finally:
        offload.close()


def test_an_edit_that_pytorch_does_not_see_in_a_step_that_derives_by_plan(auto: MakeAuto) -> None:
    training = Training(Edited, device=DEVICE)
    offload = auto(training.model)
    try:
        plan = follow(offload, training, 7)[-1]
        assert plan
        assert plan.derived
        for layer in training.model.layers:
            layer.edits = True  # type: ignore[assignment]
        with pytest.raises(EditedError):
            follow(offload, training, 1, first=7)
    finally:
        offload.close()
