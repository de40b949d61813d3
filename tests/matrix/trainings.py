"""Trainings: small ones by transformers' and Lightning's trainers, with callbacks, and one that raises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from matrix.arms import alive, batches
from matrix.models import llama
from matrix.rows.huggingface import COMMON
from matrix.rows.lightning import Module
from tba import OffloadStats


def trainer(tmp_path: Path, *callbacks: Any, kind: type[Trainer] = Trainer, **arguments: Any) -> Trainer:
    rows = [{"input_ids": row, "labels": row} for row in next(iter(batches(90, (9, 70), count=1))).tolist()]
    args = TrainingArguments(str(tmp_path), **COMMON | arguments)
    return kind(model=llama(), args=args, train_dataset=rows, callbacks=list(callbacks))


def ended(callback: Any) -> OffloadStats:
    """Nothing of a callback's Offloader is entered or alive; what it has moved."""
    assert callback.offload is not None
    assert callback.offload.closed
    assert not callback.offload.entered
    assert alive() == []
    stats: OffloadStats = callback.offload.stats()
    return stats


class Failing(TrainerCallback):
    """Raises once so many steps have ended, where it is asked to."""

    def __init__(self, event: str, error: BaseException, steps: int = 1) -> None:
        def fail(args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == steps:
                raise error

        setattr(self, event, fail)


def fit(tmp_path: Path, module: Module, *callbacks: Any) -> None:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    made = lightning.Trainer(accelerator="cpu", max_steps=3, default_root_dir=tmp_path, callbacks=[*callbacks], **quiet)
    made.fit(module, torch.utils.data.DataLoader(torch.cat(list(batches(90, (3, 70)))), batch_size=3))
