"""Megatron-Core: its forward step, other offloaders, recomputation, forwards without gradients, interleaved chunks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from matrix.arms import SMALL, alive, batches, equal
from matrix.launch import by_torchrun, launch
from matrix.rows.megatron import BATCH, MICRO_BATCHES, VOCABULARY, forward_step, gpt, initialize, step
from tba import ConfigError
from tba.integrations.megatron import OffloadedForwardStep


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    from megatron.core import parallel_state

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    initialize()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def train(forward: Any, model: nn.Module) -> tuple[list[Any], dict[str, Tensor]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for tokens in batches(VOCABULARY, (MICRO_BATCHES * BATCH[0], BATCH[1])):
        losses += step(list(model) if isinstance(model, nn.ModuleList) else model, tokens, forward)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: weight.detach().clone() for name, weight in model.named_parameters()}


def tokens() -> Tensor:
    return next(iter(batches(VOCABULARY, (MICRO_BATCHES * BATCH[0], BATCH[1]), count=1)))


def test_it_trains_as_alone_and_ends() -> None:
    plain, weights = train(forward_step, gpt())
    model = gpt()
    forward = OffloadedForwardStep(forward_step, **SMALL)
    losses, found = train(forward, model)
    assert losses == plain
    assert equal(found, weights)
    (offload,) = forward.offloads
    stats = offload.stats()
    assert stats.steps == 3
    assert stats.micro_batches == 3 * MICRO_BATCHES
    assert stats.live_records == 0
    forward.close()
    assert offload.closed
    assert alive() == []


def test_what_the_loss_function_saves_moves_too() -> None:
    def square(losses: Tensor) -> Any:
        return losses.square().mean(), {}

    def with_square(data: Iterator[Tensor], model: nn.Module) -> Any:
        return forward_step(data, model)[0], square

    moved = []
    model = gpt()
    for each in (forward_step, with_square):  # the mean saves nothing
        forward = OffloadedForwardStep(each, **SMALL | {"min_tensor_bytes": 1})
        step(model, tokens(), forward)
        moved.append(forward.offloads[0].stats().offloaded_bytes)
        forward.close()
    assert moved[1] - moved[0] == MICRO_BATCHES * BATCH[0] * BATCH[1] * 4


def test_chunks_of_a_pipeline_have_an_offloader_each() -> None:
    forward = OffloadedForwardStep(forward_step, **SMALL)
    for model in (chunks := [gpt(), gpt()]):
        step(model, tokens(), forward)
        step(model, tokens(), forward)
    assert len(forward.offloads) == len(chunks)
    assert [each.stats().micro_batches for each in forward.offloads] == [2 * MICRO_BATCHES] * 2
    forward.close()


def test_full_recomputation_is_exact_and_only_inputs_of_layers_move() -> None:
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    plain, weights = train(forward_step, gpt())
    model, other = gpt(**recompute), gpt()
    forward = OffloadedForwardStep(forward_step, **SMALL)
    losses, found = train(forward, model)
    assert losses == plain
    assert equal(found, weights)
    (offload,) = forward.offloads
    whole = OffloadedForwardStep(forward_step, **SMALL)
    train(whole, other)
    assert 0 < offload.stats().offloaded_bytes < whole.offloads[0].stats().offloaded_bytes / 3
    forward.close()
    whole.close()


def test_forwards_without_gradients_are_left_alone() -> None:
    forward = OffloadedForwardStep(forward_step, **SMALL)
    with torch.no_grad():
        assert len(step(gpt(), tokens(), forward, forward_only=True)) == MICRO_BATCHES
    assert forward.offloads == []


@pytest.mark.parametrize("setting", ["cpu_offloading", "fine_grained_activation_offloading"])
def test_megatrons_own_offloading_is_named(setting: str) -> None:
    model = gpt()
    setattr(model.config, setting, True)  # not before: both need Transformer Engine
    with pytest.raises(ConfigError, match=rf"delete {setting}=True from TransformerConfig"):
        OffloadedForwardStep(forward_step, **SMALL)(iter([tokens()]), model)


def test_cuda_graphs_are_named() -> None:
    model = gpt()
    model.config.cuda_graph_impl = "local"
    with pytest.raises(ConfigError, match='delete cuda_graph_impl="local" from TransformerConfig'):
        OffloadedForwardStep(forward_step, **SMALL)(iter([tokens()]), model)


def test_a_schedule_plan_is_named() -> None:
    def plan(data: Iterator[Tensor], model: nn.Module) -> Any:
        return object(), None

    with pytest.raises(ConfigError, match="delete overlap_moe_expert_parallel_comm=True"):
        OffloadedForwardStep(plan, **SMALL)(iter([tokens()]), gpt())


def test_a_wrong_setting_is_told_before_training() -> None:
    with pytest.raises(ConfigError, match="did you mean nvme"):
        OffloadedForwardStep(forward_step, tier="nvm")


def test_a_forward_step_that_raises_leaves_nothing_entered() -> None:
    def broken(data: Iterator[Tensor], model: nn.Module) -> Any:
        forward_step(data, model)
        raise ValueError("mine")

    forward = OffloadedForwardStep(broken, **SMALL)
    model = gpt()
    with pytest.raises(ValueError, match="mine"):
        step(model, tokens(), forward)
    assert not forward.offloads[0].entered
    forward.close()
    assert alive() == []


INTERLEAVED = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
from megatron.core import parallel_state
from matrix.arms import alive, equal
from matrix.rows.megatron import forward_step, gpt, initialize
from matrix.test_megatron import SMALL, OffloadedForwardStep, train
initialize(pipeline=2, chunks=2)
found = []
for forward in (forward_step, OffloadedForwardStep(forward_step, **SMALL)):
    chunks = torch.nn.ModuleList(gpt(pipeline=2, chunk=chunk) for chunk in range(2))
    found.append(train(forward, chunks))
assert found[0][0] == found[1][0], found
assert equal(found[0][1], found[1][1])
offloads = forward.offloads
assert len(offloads) == 2
assert all(each.stats().offloaded_bytes > 0 and each.stats().live_records == 0 for each in offloads)
forward.close()
assert alive() == [], alive()
dist.barrier()
print("EQUAL", flush=True)
import os; os._exit(0)
"""


def test_an_interleaved_pipeline_over_two_ranks_trains_as_alone(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(INTERLEAVED)
    _, printed = launch([*by_torchrun(2), "train.py"], tmp_path, 600)
    assert printed.count("EQUAL") == 2, printed[-4000:]
