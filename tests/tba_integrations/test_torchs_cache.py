"""Torch's own selective checkpointing: from 2.14 on it can show hooks what it stores, and then that moves."""

from __future__ import annotations

import inspect
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from support.exactness import assert_bit_equal
from tba import Offloader, OffloadWarning, offload_context

ADDMM = torch.ops.aten.addmm.default
BATCH, WIDTH, BLOCKS = 64, 64, 3
STORED_BYTES = 5 * BATCH * WIDTH * 4  # of each block: the results of its two linear layers
SWITCH = "respect_saved_tensors_hooks"
pytestmark = pytest.mark.skipif(
    SWITCH not in inspect.signature(checkpoint).parameters, reason=f"this torch has no {SWITCH}"
)


class Products(TorchDispatchMode):
    """Counts the products of matrices with a bias that run while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is ADDMM
        return func(*args, **(kwargs or {}))


def _model() -> nn.ModuleList:
    torch.manual_seed(3)
    return nn.ModuleList(
        nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(BLOCKS)
    )


def _engine(model: nn.Module, scratch: Path, **settings: Any) -> Offloader:
    given: dict[str, Any] = {"tier": "nvme", "min_tensor_bytes": 4096, "prefetch_bytes": 0} | settings
    return offload_context(model, storage_paths=scratch, **given)


def _forward(model: nn.ModuleList, x: Tensor, edits: bool = False, **asked: Any) -> Tensor:
    theirs = partial(create_selective_checkpoint_contexts, [ADDMM], allow_cache_entry_mutation=edits)
    for block in model:
        x = checkpoint(block, x, use_reentrant=False, context_fn=theirs, **asked)
    return x


@pytest.mark.parametrize("asked", [{}, {SWITCH: True}], ids=["by default", "asked for"])
@pytest.mark.parametrize("settings", [{}, {"compress": "safe8"}, {"tier": "auto", "memory_budget": "1GiB"}], ids=str)
def test_results_that_torch_stores_move_where_it_shows_them(
    scratch: Path, asked: dict[str, Any], settings: dict[str, Any]
) -> None:
    model, plain_model = _model(), _model()
    offload = _engine(model, scratch, **settings)
    for _ in range(3):
        x = torch.randn(BATCH, WIDTH, requires_grad=True)
        plain_x = x.detach().clone().requires_grad_()
        with offload:
            out = _forward(model, x * 1, **asked)
        offload.flush()
        with Products() as products:
            out.square().mean().backward()
        assert products.count == 0
        _forward(plain_model, plain_x * 1).square().mean().backward()
        if "compress" not in settings:
            assert_bit_equal(x.grad, plain_x.grad)
    stats = offload.stats()
    assert stats.unseen_bytes == 0
    assert stats.saved_bytes >= 3 * BLOCKS * STORED_BYTES
    offload.close()


@pytest.mark.parametrize("edits", [False, True], ids=["switched off", "may be edited"])
def test_a_cache_is_left_alone_where_the_program_says_so(scratch: Path, edits: bool) -> None:
    model = _model()
    offload = _engine(model, scratch)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with offload:
            x = torch.randn(BATCH, WIDTH, requires_grad=True) * 1
            out = _forward(model, x, edits, **({} if edits else {SWITCH: False}))
    assert [SWITCH in str(each.message) for each in told if each.category is OffloadWarning] == [True]
    out.sum().backward()
    assert offload.stats().unseen_bytes == BLOCKS * STORED_BYTES
    offload.close()
