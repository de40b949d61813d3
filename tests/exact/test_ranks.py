"""Two ranks under what PyTorch has for data-parallel training, an engine in each: exact, and weights are left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from support.exactness import Run, assert_through_file, run_training
from support.ranks import start
from support.zoo import FAMILIES
from tba import Offloader, OffloadStats, offload_context

dist = pytest.importorskip("torch.distributed")
if not dist.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)

Wrap = Callable[[nn.Module], nn.Module]

_LLAMA = next(family for family in FAMILIES if family.name == "llama")


def _alone(model: nn.Module) -> nn.Module:
    return model


def _ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def _fsdp1(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({type(model.get_submodule(_LLAMA.blocks[0]))})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"))


def _fsdp2(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name in (*_LLAMA.blocks, ""):
        fully_shard(model.get_submodule(name), mesh=mesh)
    return model


def _train(wrap: Wrap, scratch: Path | None, *, checkpointed: bool, forwards: int) -> tuple[Run, OffloadStats | None]:
    """Three steps, offloaded to `scratch` or plain: all ranks from the same weights, each with batches of its own."""
    offloads: list[Offloader] = []

    def make_model() -> nn.Module:
        torch.manual_seed(0)
        model = _LLAMA.make_model()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        model = wrap(model)
        torch.manual_seed(100 + dist.get_rank())
        return model

    def context(model: nn.Module) -> Offloader:
        offloads.append(offload_context(model, tier="nvme", min_tensor_bytes=0, storage_paths=scratch))
        return offloads[-1]

    if scratch is None:
        return run_training(make_model, _LLAMA.make_batch, forwards=forwards), None
    run = run_training(
        make_model, _LLAMA.make_batch, forwards=forwards, context=context, between=lambda: offloads[-1].flush()
    )
    stats = offloads[-1].stats()
    offloads[-1].close()
    return run, stats


def _mine(tensor: Tensor | None) -> Tensor | None:
    return tensor.to_local() if tensor is not None and hasattr(tensor, "to_local") else tensor


def _shards(run: Run) -> Run:
    """Keep of a run's gradients and weights the shards that this rank holds."""
    gradients = [{name: _mine(tensor) for name, tensor in step.items()} for step in run.gradients]
    weights = {name: _mine(tensor) for name, tensor in run.weights.items()}
    return Run(run.losses, gradients, weights)  # type: ignore[arg-type]


# FullyShardedDataParallel itself cannot have two forwards before two backwards.
_CASES: list[tuple[Wrap, int]] = [(_ddp, 2), (_fsdp1, 1), (_fsdp2, 2)]


def _rank_main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    try:
        for wrap, forwards in _CASES:
            for checkpointed in (False, True):
                try:
                    _check(wrap, Path(folder), checkpointed=checkpointed, forwards=forwards)
                except BaseException as error:
                    error.add_note(f"{wrap.__name__}, {checkpointed=}")
                    raise
    finally:
        dist.destroy_process_group()


def _check(wrap: Wrap, folder: Path, *, checkpointed: bool, forwards: int) -> None:
    plain, _ = _train(wrap, None, checkpointed=checkpointed, forwards=forwards)
    moved, stats = _train(wrap, folder, checkpointed=checkpointed, forwards=forwards)
    _, alone = _train(_alone, folder, checkpointed=checkpointed, forwards=forwards)
    _shards(moved).assert_equals(_shards(plain))
    assert stats is not None
    assert alone is not None
    assert_through_file(stats)
    assert stats.weight_bytes == alone.weight_bytes > 0
    assert stats.offloaded_bytes == alone.offloaded_bytes


def test_two_ranks_are_exact_and_their_weights_stay(scratch: Path) -> None:
    start(_rank_main, str(scratch), ranks=2)  # one pair for all: importing takes longer than training
