"""Megatron-Core: `GPTModel` under its own schedules, with the forward step of `tba.integrations.megatron`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from matrix.arms import Arm, batches
from matrix.devices import cuda_is_the_cpu
from tba import offload_context
from tba.integrations.megatron import OffloadedForwardStep

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of missing Transformer Engine and Apex, a dozen
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.core.transformer import TransformerConfig

VOCABULARY, BATCH, MICRO_BATCHES = 96, (3, 70), 2


def initialize(*, tensor: int = 1, pipeline: int = 1, chunks: int | None = None) -> None:
    """Make Megatron-Core's groups of ranks, and a tracker of random numbers that needs no CUDA generator."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor, pipeline, chunks)
    initialize_rng_tracker(inference_rng_tracker=True)


def gpt(*, tensor: int = 1, pipeline: int = 1, chunk: int | None = None, **more: Any) -> GPTModel:
    """This rank's part of a tiny model, or one of its two chunks where a pipeline is interleaved."""
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=None if chunk is None else 2,
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=pipeline > 1,  # as Megatron-LM trains
        **more,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=BATCH[1],
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=chunk is None, vp_stage=chunk),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=chunk is None, vp_stage=chunk),
        vp_stage=chunk,
    )


def forward_step(data: Iterator[Tensor], model: nn.Module) -> Any:
    """As Megatron-Core's schedules call it: the losses of a micro-batch, and what makes one of them."""
    tokens = next(data)
    length = tokens.shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    output = model(tokens, torch.arange(length).expand_as(tokens), mask, labels=tokens.roll(-1, 1))
    return output, _mean


def _mean(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return losses.mean(), {"loss": losses.mean().detach()}


def step(model: nn.Module | list[nn.Module], tokens: Tensor, forward: Any, **more: Any) -> list[dict[str, Tensor]]:
    """Run forward and backward of all micro-batches; the losses are the last stage's."""
    sizes = {"seq_length": BATCH[1], "micro_batch_size": BATCH[0], "num_microbatches": MICRO_BATCHES}
    data: Any = iter(tokens.chunk(MICRO_BATCHES))
    if isinstance(model, list):  # of chunks, each with data of its own
        data = [iter(tokens.chunk(MICRO_BATCHES)) for _ in model]
    given = {"forward_step_func": forward, "data_iterator": data, "model": model, "forward_only": False}
    with cuda_is_the_cpu():
        found: list[dict[str, Tensor]] = get_forward_backward_func()(**given | sizes | more)
    return found


def _train(arm: Arm, model: nn.Module) -> None:
    forward: Any = forward_step
    if arm.settings is not None:
        forward = OffloadedForwardStep(forward_step, **arm.settings)
        arm.watch(offload_context(model, **arm.settings), model)  # the same that its first step will ask for
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for tokens in batches(VOCABULARY, (MICRO_BATCHES * BATCH[0], BATCH[1])):
        losses = step(model, tokens, forward)
        optimizer.step()
        optimizer.zero_grad()
        arm.losses.append(sum(each["loss"].item() for each in losses))
    arm.end(model)
    if arm.settings is not None:
        assert len(forward.offloads) == 1
        forward.close()


def pipeline(arm: Arm) -> None:
    """Megatron-Core GPTModel, pipeline (1F1B), 2 ranks"""
    initialize(pipeline=dist.get_world_size())
    _train(arm, gpt(pipeline=dist.get_world_size()))


def tensor(arm: Arm) -> None:
    """Megatron-Core GPTModel, tensor parallel, 2 ranks"""
    initialize(tensor=dist.get_world_size())
    _train(arm, gpt(tensor=dist.get_world_size()))
