"""Derivations on a device: how often operators run again, and which edits the sums of a tensor tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from support.engine import parts_of
from support.exactness import assert_bit_equal
from support.gpu import DEVICE, gpu_only, leaf_of, offloader
from tba._derive.check import digest
from tba._derive.operators import OPERATORS

pytestmark = gpu_only


@pytest.mark.parametrize(("verify", "runs"), [("checksum", (1, 1, 0, 0)), ("full", (1, 1, 1, 1))])
def test_operators_run_again_in_forward_in_two_steps_only(
    verify: str, runs: tuple[int, ...], scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = 0

    def gelu(tensors: list[Any], scalars: Any, output: Any) -> Tensor:
        nonlocal counted
        counted += 1
        return functional.gelu(tensors[0], approximate=scalars[0])

    monkeypatch.setitem(OPERATORS, "GeluBackward0", OPERATORS["GeluBackward0"]._replace(run=gelu))  # type: ignore[arg-type]
    leaf = leaf_of(elements=1 << 14)
    expected = torch.autograd.grad(functional.gelu(leaf * 1.0).square().sum(), leaf)[0]
    with offloader("keep", scratch, compress="exact", verify=verify) as offload:
        for often in runs:
            counted = 0
            with offload:
                loss = functional.gelu(leaf * 1.0).square().sum()
            offload.flush()
            assert counted == often
            assert_bit_equal(torch.autograd.grad(loss, leaf)[0], expected)
            assert counted == often + 1
        assert not parts_of(offload).derivations.waiting  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("elements", [1, 1023, 1024, 4096, 70_001])
def test_sums_tell_a_flipped_bit_a_sign_and_an_order(dtype: torch.dtype, elements: int) -> None:
    tensor = (torch.rand(elements, generator=torch.Generator().manual_seed(0)) * 200 + 1).to(dtype).to(DEVICE)
    known = digest(tensor)
    assert isinstance(known, Tensor)
    assert torch.equal(known, digest(tensor.clone()))  # type: ignore[arg-type]
    bit = tensor.clone()
    bit.view(torch.uint8)[elements // 2 * tensor.itemsize] ^= 1
    edits = [bit, tensor.roll(1)] if elements > 1 else [bit]
    edits += [-tensor] if dtype.is_floating_point else []
    for edited in edits:
        assert not torch.equal(known, digest(edited))  # type: ignore[arg-type]
