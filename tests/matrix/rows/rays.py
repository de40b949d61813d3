"""Ray Train: `TorchTrainer` with two workers on a local Ray, and `tba.attach` in each.

python -m matrix.rows.rays OUT rays:trainer
"""

from __future__ import annotations

import sys
from typing import Any

import ray
import ray.train
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

from matrix import runner
from matrix.arms import Arm
from matrix.models import llama
from matrix.rows.parallel import train


def trainer(arm: Arm) -> None:
    """Ray Train (TorchTrainer), 2 workers"""
    train(arm, prepare_model(llama()), rank=ray.train.get_context().get_world_rank())


def _worker(given: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    folder = runner.folder_of(given["row"], given["out"])
    runner.run(given["row"], folder, rank=ray.train.get_context().get_world_rank())


def main(out: str, row: str) -> None:
    """Start Ray here, and train in two workers."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=True)
    scaling = ScalingConfig(num_workers=2, use_gpu=False, resources_per_worker={"CPU": 1})
    run = RunConfig(storage_path=out, name="ray")
    TorchTrainer(_worker, train_loop_config={"row": row, "out": out}, scaling_config=scaling, run_config=run).fit()


if __name__ == "__main__":
    main(*sys.argv[1:])
