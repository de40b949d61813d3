"""Recomputing peers: PyTorch's checkpointing, its selective form, torch_remat, and two that offload the inputs."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as recompute

from .._workload.accelerator import in_use
from .._workload.families import blocks
from .._workload.gpt import Attention
from .peer import Function, Wrapper

# Operators whose results selective checkpointing keeps: all matrix products. The rest is cheap to recompute.
_KEPT = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)


def checkpointed(model: nn.Module | None, scratch: Path) -> Wrapper:
    """Recompute by `torch.utils.checkpoint`."""
    return lambda function: partial(recompute, function, use_reentrant=False)


def selective(model: nn.Module | None, scratch: Path) -> Wrapper:
    """Recompute everything but matrix products."""
    kept = {getattr(torch.ops.aten, name) for name in _KEPT}

    def policy(context: Any, operator: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
        packet = getattr(operator, "overloadpacket", operator)
        return CheckpointPolicy.MUST_SAVE if packet in kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return lambda function: partial(recompute, function, use_reentrant=False, context_fn=contexts)


def remat(model: nn.Module | None, scratch: Path) -> Wrapper:
    """Recompute by torch_remat everything but the attention of each block, if the block has one that can be found."""
    import torch_remat

    class RandomState:
        """PyTorch's generators of the CPU and the device, which torch_remat leaves to its user."""

        def snapshot(self) -> list[Tensor]:
            card = in_use()
            return [torch.get_rng_state(), *([card.get_rng_state()] if card else [])]

        def restore(self, states: list[Tensor]) -> None:
            torch.set_rng_state(states[0])
            for state in states[1:]:
                in_use().set_rng_state(state)

    for block in blocks(model) if model is not None else ():
        _keep_attention(block, torch_remat)
    return lambda function: torch_remat.checkpoint(recompute_state_hooks=(RandomState(),))(function)


def _keep_attention(block: Any, torch_remat: Any) -> None:
    def kept(function: Function, *, first: bool) -> Function:
        def only(*arguments: Any, **named: Any) -> Any:
            found = function(*arguments, **named)
            return found[0] if first else found

        region = torch_remat.region(only, "attention", recompute=False)

        def call(*arguments: Any, **named: Any) -> Any:
            found = region(*arguments, **named)
            torch_remat.recompute_needs_tensor(found)
            return (found, None) if first else found

        return call

    for name in ("self_attn", "attention"):  # those of transformers return weights too, that of our GPT does not
        module = getattr(block, name, None)
        if isinstance(module, nn.Module):
            module.forward = kept(module.forward, first=not isinstance(module, Attention))


def transformers_offload(model: nn.Module | None, scratch: Path) -> Wrapper:
    """Checkpoint by the function that transformers sets for `offload=True`: inputs of blocks move to host memory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
    donor = LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes))
    donor.activation_checkpointing_enable({"use_reentrant": False}, offload=True)
    [layer] = blocks(donor)
    return lambda function: partial(layer._gradient_checkpointing_func, function)


def deepspeed(model: nn.Module | None, scratch: Path) -> Wrapper:
    """Checkpoint by DeepSpeed with `cpu_checkpointing`: inputs of blocks move to host memory."""
    import deepspeed as library

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    library.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    library.checkpointing.configure(None, partition_activations=True, checkpoint_in_cpu=True)

    def wrap(function: Function) -> Function:
        return lambda *arguments, **named: library.checkpointing.checkpoint(partial(function, **named), *arguments)

    return wrap
