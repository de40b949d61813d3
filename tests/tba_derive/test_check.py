"""Edits that PyTorch does not see, once recipes count as right: plain gradients, or an error that says what to do."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.derive import runs_of_gelu
from support.edits import CASES, EDITS, PROVEN, TOKENS, WIDTH, Program, assert_right_or_refused
from support.engine import activation, engine
from support.exactness import equal


@pytest.mark.sampled(20)
@pytest.mark.parametrize(("edit", "what", "when", "raises"), CASES)
def test_an_edit_without_a_trace_gives_plain_gradients_or_the_error(
    edit: str, what: str, when: str, raises: bool, scratch: Path
) -> None:
    with engine(scratch, tier="keep", compress="exact") as offload:
        assert_right_or_refused(offload, edit, what, when, raises=raises)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_in_forward_is_no_error_where_each_step_compares_in_full(edit: str, scratch: Path) -> None:
    plain, ours = Program(), Program()
    with engine(scratch, tier="keep", compress="exact", verify="full") as offload:
        for how in (*(None,) * PROVEN, EDITS[edit]):
            wanted = plain.step(nullcontext(), how, "derived", "at once")
            assert equal(ours.step(offload, how, "derived", "at once"), wanted)


@pytest.mark.parametrize(("verify", "runs"), [("checksum", (2, 2, 1, 1)), ("full", (2, 2, 2, 2))])
def test_operators_run_again_in_forward_in_two_steps_only(
    verify: str, runs: tuple[int, ...], scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = runs_of_gelu(monkeypatch)
    program = Program()
    with engine(scratch, tier="keep", compress="exact", verify=verify) as offload:
        for most in runs:
            ran.clear()
            program.step(offload, None, "", "")
            assert len(ran) == most
        assert offload.stats().derived_bytes > 0


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_an_eps_changed_in_a_later_step_is_found_in_forward(scale: float, scratch: Path) -> None:
    """The first row varies so much that it does not tell one eps from another."""

    def gradients(program: Program, context: Any) -> list[Tensor]:
        leaf, x = activation(TOKENS, WIDTH)
        rows = torch.ones(TOKENS, 1)
        rows[0] = scale
        with context:
            loss = program.head(program.norm(x * rows)).square().sum()
        return list(torch.autograd.grad(loss, [leaf, *program.norm.parameters(), *program.head.parameters()]))

    plain, ours = Program(), Program()
    with engine(scratch, tier="keep", compress="exact") as offload:
        for eps in (*(1e-5,) * PROVEN, 1e-6, 0.037):
            plain.norm.eps = ours.norm.eps = eps
            assert equal(gradients(ours, offload), gradients(plain, nullcontext()))
        assert offload.stats().derived_bytes >= (PROVEN + 1) * TOKENS * WIDTH * 4


def test_nothing_is_derived_where_that_is_off(scratch: Path) -> None:
    program = Program()
    wanted = Program().step(nullcontext(), None, "", "")
    with engine(scratch, tier="keep", compress="exact", derive=False) as offload:
        assert equal(program.step(offload, None, "", ""), wanted)
        assert offload.stats().derived_bytes == 0
