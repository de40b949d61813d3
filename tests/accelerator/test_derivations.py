"""Derivations on a device: how often operators run again, and which edits the sums of a tensor tell."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from support.derive import runs_of_gelu
from support.engine import parts_of
from support.exactness import assert_bit_equal
from support.gpu import DEVICE, gpu_only, leaf_of, offloader
from tba._derive.check import digest

pytestmark = gpu_only


@pytest.mark.parametrize(("verify", "runs"), [("checksum", (1, 1, 0, 0)), ("full", (1, 1, 1, 1))])
def test_operators_run_again_in_forward_in_two_steps_only(
    verify: str, runs: tuple[int, ...], scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = runs_of_gelu(monkeypatch)
    leaf = leaf_of(elements=1 << 14)
    expected = torch.autograd.grad(functional.gelu(leaf * 1.0).square().sum(), leaf)[0]
    with offloader("keep", scratch, compress="exact", verify=verify) as offload:
        for often in runs:
            ran.clear()
            with offload:
                loss = functional.gelu(leaf * 1.0).square().sum()
            offload.flush()
            assert len(ran) == often
            assert_bit_equal(torch.autograd.grad(loss, leaf)[0], expected)
            assert len(ran) == often + 1
        assert not parts_of(offload).derivations.waiting  # type: ignore[union-attr]


@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("elements", [0, 1, 1023, 1024, 4096, 70_001])
def test_sums_tell_a_flipped_bit_a_sign_and_an_order(dtype: torch.dtype, elements: int, offset: int) -> None:
    def sums(values: Tensor) -> Tensor:
        memory = torch.zeros(offset + elements, dtype=dtype, device=DEVICE)
        found = digest(memory[offset:].copy_(values))
        assert isinstance(found, Tensor)
        return found

    tensor = (torch.rand(elements, generator=torch.Generator().manual_seed(0)) * 200 + 1).to(dtype)
    known, edits = sums(tensor), []
    assert torch.equal(known, sums(tensor))
    if elements:
        edits = [tensor.clone()]
        edits[0].view(torch.uint8)[elements // 2 * tensor.itemsize] ^= 1
    if elements > 1:
        edits.append(tensor.roll(1))
    if elements and dtype.is_floating_point:
        edits.append(-tensor)
    assert not any(torch.equal(known, sums(edited)) for edited in edits)
