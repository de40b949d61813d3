"""Torchtitan in one process: its command line, other offloaders, pipelines' parts, a training that raises."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from matrix.arms import SMALL, alive
from matrix.rows.torchtitan import OVERRIDE, Losses, configuration
from tba import ConfigError
from tba.integrations import torchtitan as with_torchtitan

# What else of torchtitan is needed is imported within tests: after `matrix.rows.torchtitan`, which tells it of the CPU.
IMPORTS = [(OVERRIDE, SMALL)]
SELECTIVE = "tba.integrations.torchtitan.selective"


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    patch.setenv("LOCAL_RANK", "0")
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with torch.autograd.set_multithreading_enabled(False):
        yield
    dist.destroy_process_group()
    logging.disable(logging.NOTSET)
    gc.enable()  # torchtitan has switched it off
    patch.undo()


def metrics(imports: list[Any] = IMPORTS, **config_dict: Any) -> Any:
    """What a Trainer makes of its metrics, given the rest of its configuration."""
    from torchtitan.config.override import apply_overrides

    config = configuration("", imports=imports)
    apply_overrides(config.override, config)
    given = {"training": {"disable_cuda_graphs": True}} | config_dict
    return config.metrics.build(parallel_dims=SimpleNamespace(), config_dict=given)


def test_the_command_line_takes_it_and_every_setting() -> None:
    """As the module's docstring has it."""
    from torchtitan.config import ConfigManager
    from torchtitan.config.override import apply_overrides

    start = ["--module", "llama3", "--config", "llama3_8b", "--training.disable_cuda_graphs"]
    setting = '={"tier": "auto", "memory_budget": "8GiB"}'
    config: Any = ConfigManager().parse_args([*start, "--override.imports", OVERRIDE + setting])
    apply_overrides(config.override, config)
    assert config.metrics.tba == {"tier": "auto", "memory_budget": "8GiB"}
    assert config.metrics.to_dict()["tba"] == config.metrics.tba
    assert config.training.disable_cuda_graphs


def test_it_trains_checkpointed_blocks_and_ends_where_a_step_raises(tmp_path: Path) -> None:
    from torchtitan.distributed.activation_checkpoint import FullAC

    config = configuration(str(tmp_path), imports=IMPORTS)
    config.activation_checkpoint = FullAC.Config()
    trainer = config.build()
    data = trainer.batch_generator(trainer.dataloader)
    for _ in range(2):
        trainer.step += 1
        trainer.train_step(data)
    (offload,) = trainer.metrics_processor.offloads
    assert [shown["tba/offloaded_bytes"] > 0 for shown in trainer.metrics_processor.shown] == [True, True]
    assert offload.stats().steps == 2
    assert offload.stats().live_records == 0

    def broken(*_: Any) -> None:
        raise ValueError("mine")

    trainer.model_parts[0].layers["1"].register_forward_hook(broken)
    with pytest.raises(ValueError, match="mine"):
        trainer.train_step(data)
    assert not offload.entered
    trainer.close()  # which torchtitan's main does, also then
    assert offload.closed
    assert alive() == []


def test_selective_checkpointing_is_exact_and_what_it_saves_moves(tmp_path: Path) -> None:
    """The same losses three times: torchtitan alone, with `offload`, with `selective` too."""
    from torchtitan.distributed.activation_checkpoint import SelectiveAC

    losses, moved, unseen = [], [], []
    for imports in ([], IMPORTS, [*IMPORTS, SELECTIVE]):
        torch.manual_seed(0)
        config = configuration(str(tmp_path), imports=imports)
        config.activation_checkpoint = SelectiveAC.Config()
        config.debug.seed = 5
        trainer = config.build()
        data = trainer.batch_generator(trainer.dataloader)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch's selective checkpointing keeps")
            for _ in range(2):
                trainer.step += 1
                trainer.train_step(data)
        losses.append([shown["loss"] for shown in trainer.metrics_processor.shown])
        if imports:
            stats = trainer.metrics_processor.offloads[0].stats()
            moved.append(stats.offloaded_bytes)
            unseen.append(stats.unseen_bytes)
        trainer.close()
    assert losses[0] == losses[1] == losses[2]
    assert moved[1] > 3 * moved[0] > 0
    assert unseen[0] > 0 == unseen[1]
    assert alive() == []


def test_metrics_of_a_user_keep_their_class() -> None:
    made = metrics()
    assert isinstance(made, Losses)
    made.close()


def test_every_part_of_a_pipeline_is_attached_and_their_figures_are_summed() -> None:
    made = metrics()
    made.model_parts = parts = [
        nn.Sequential(nn.Linear(64, 64), nn.Tanh()),
        nn.Sequential(nn.Linear(64, 64), nn.Tanh()),
    ]
    assert len(made.offloads) == 2
    moved = []
    for part in parts:
        part(torch.ones(64, 64, requires_grad=True)).sum().backward()
        moved.append(with_torchtitan._sum(made.offloads)["tba/offloaded_bytes"])
    assert moved[1] == 2 * moved[0] > 0
    made.close()
    assert all(each.closed for each in made.offloads)
    assert alive() == []


def test_torchtitans_own_offloading_is_named() -> None:
    from torchtitan.experiments.graph_trainer.configs import GraphTrainerCompileConfig

    compiled = GraphTrainerCompileConfig(memory_policy="sac_and_offload")
    with pytest.raises(ConfigError, match=r"delete --compile\.memory_policy sac_and_offload"):
        metrics(compile={"memory_policy": compiled.memory_policy, "mode": compiled.mode})


def test_a_step_traced_as_one_graph_is_named() -> None:
    from torchtitan.experiments.graph_trainer.configs import GraphTrainerCompileConfig

    with pytest.raises(ConfigError, match="graph_trainer traces forward and backward as one graph"):
        metrics(compile={"mode": GraphTrainerCompileConfig().mode})


def test_cuda_graphs_are_named() -> None:
    with pytest.raises(ConfigError, match=r"add --training\.disable_cuda_graphs"):
        metrics(training={"disable_cuda_graphs": False})


@pytest.mark.parametrize(
    ("settings", "words"), [({"tier": "nvm"}, "did you mean nvme"), ({"teir": "nvme"}, "unknown setting")]
)
def test_a_wrong_setting_is_told_before_training(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        metrics([(OVERRIDE, settings)])
