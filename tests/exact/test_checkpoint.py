"""Checkpointed training with the context outside or inside of what is recomputed is bit for bit plain training."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from support.exactness import (
    CPU,
    assert_through_file,
    run_training,
)
from support.gpu import plainly
from support.zoo import FAMILIES, Family
from tba import Offloader, offload_context

KINDS = pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "nonreentrant"])
BACKWARD = pytest.mark.parametrize("backward", ["inside", "outside"])
FAMILY = pytest.mark.parametrize("family", FAMILIES, ids=str)


class Arm:
    """One run: where the context stands, and what the engine counted. Without `scratch`: plain PyTorch."""

    def __init__(
        self, family: Family, use_reentrant: bool, where: str, scratch: Path | None = None, device: torch.device = CPU
    ) -> None:
        self.family, self.use_reentrant, self.where, self.scratch = family, use_reentrant, where, scratch
        self.device = device
        self.offload: Offloader | None = None

    def make_model(self) -> nn.Module:
        model = self.family.make_model()
        if self.scratch is not None:
            self.offload = offload_context(model, tier="nvme", min_tensor_bytes=0, storage_paths=self.scratch)
        for name in self.family.blocks:
            block = model.get_submodule(name)
            block.forward = self._recomputed(block.forward)
        return model

    def _recomputed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            # The reentrant kind takes neither keywords nor nested arguments.
            leaves, spec = tree_flatten((args, kwargs))
            return checkpoint(partial(body, spec), *leaves, use_reentrant=self.use_reentrant)

        def body(spec: Any, *leaves: Any) -> Any:
            args, kwargs = tree_unflatten(leaves, spec)
            if self.where == "outside" or self.offload is None:
                return forward(*args, **kwargs)
            with self.offload:
                out = forward(*args, **kwargs)
            self.offload.flush()  # what the reentrant kind packs in backward goes through the file too
            return out

        return wrapped

    def context(self, _: nn.Module) -> AbstractContextManager[Any]:
        return self.offload if self.offload is not None else nullcontext()

    def flush(self) -> None:
        if self.offload is not None:
            self.offload.flush()

    def run(self, **how: Any) -> Any:
        return run_training(self.make_model, self.family.make_batch, between=self.flush, device=self.device, **how)


@FAMILY
@KINDS
@BACKWARD
def test_context_around_checkpointed_blocks(
    family: Family, use_reentrant: bool, backward: str, device: torch.device, scratch: Path
) -> None:
    """Inputs of the blocks are offloaded; tensors that backward makes again are used at once and stay."""
    if family.name == "jagged" and not use_reentrant:
        pytest.skip("torch's checkpoint wants to know the shape of what attention saves on a CPU, which has none")
    plain = plainly(Arm(family, use_reentrant, "outside", device=device).run, device)
    arm = Arm(family, use_reentrant, "outside", scratch, device)
    moved = arm.run(context=arm.context, backward_inside=backward == "inside")
    stats = arm.offload.stats()
    arm.offload.close()
    moved.assert_equals(plain)
    recomputed = use_reentrant and backward == "inside"
    kept_because = {"recomputed"} if recomputed else ()
    assert_through_file(stats, kept_because=kept_because, unread_bytes=3 * family.unread_bytes)
    assert stats.weight_bytes > 0
    assert (stats.kept_by_reason.get("recomputed", 0) > 0) == recomputed


# The reentrant kind runs its forward without gradients: seen from inside, nothing is saved until backward.


@FAMILY
@KINDS
@BACKWARD
def test_context_inside_checkpointed_blocks(family: Family, use_reentrant: bool, backward: str, scratch: Path) -> None:
    """The non-reentrant kind then saves through the engine in forward and recomputes nothing; the other in backward.

    So the first is compared with a run without checkpointing (which updates the statistics of batch norm once, too).
    A graph that is kept may be asked again, so that what is packed in its backward goes to the file as well.
    """
    if use_reentrant:
        plain = Arm(family, True, "inside").run(retain_graph=True)
    else:
        plain = run_training(family.make_model, family.make_batch)
    arm = Arm(family, use_reentrant, "inside", scratch)
    inside = {"backward_context": lambda: arm.offload} if backward == "inside" else {}
    moved = arm.run(retain_graph=True, **inside)
    stats = arm.offload.stats()
    arm.offload.close()
    moved.assert_equals(plain)
    assert_through_file(stats)
    assert stats.weight_bytes > 0
